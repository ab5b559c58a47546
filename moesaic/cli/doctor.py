"""What this machine is and can do, and what is missing.

moesaic doctor
moesaic doctor --json
"""

from __future__ import annotations

from moesaic.cli.app import JsonFlag, print_json

ORDER = 95


def command(json: JsonFlag = False) -> None:
    """Look at this machine: hardware, dtypes that are fast here, versions, what is missing."""
    from rich.console import Console
    from rich.markup import escape

    from moesaic.doctor import examine

    if json:
        found = list(examine())
        print_json({"fine": all(finding.fine for finding in found), "findings": found})
        return
    console = Console(highlight=False)
    for finding in examine():
        sign = "[green]✓[/green]" if finding.fine else "[yellow]![/yellow]"
        console.print(f"{sign} {finding.name:17} {escape(finding.found)}")
        if finding.remedy:
            console.print(f"  {'':17} {escape(finding.remedy)}")
