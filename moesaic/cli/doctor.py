"""What this machine is and can do, and what is missing.

moesaic doctor
moesaic doctor --score
moesaic doctor --json
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import typer

from moesaic.cli.app import JsonFlag, print_json

ORDER = 95


ScoreFlag = Annotated[bool, typer.Option("--score", help="Train a little and give the machine one number (seconds).")]


def command(score: ScoreFlag = False, json: JsonFlag = False) -> None:
    """Look at this machine: hardware, dtypes that are fast here, versions, what is missing."""
    from rich.console import Console
    from rich.markup import escape

    from moesaic.doctor import Finding, examine
    from moesaic.plan.aiperf import score_here

    def findings() -> Iterator[Finding]:
        yield from examine()
        if score:
            yield Finding("score", str(score_here()))

    if json:
        found = list(findings())
        print_json({"fine": all(finding.fine for finding in found), "findings": found})
        return
    console = Console(highlight=False)
    for finding in findings():
        sign = "[green]✓[/green]" if finding.fine else "[yellow]![/yellow]"
        console.print(f"{sign} {finding.name:17} {escape(finding.found)}")
        if finding.remedy:
            console.print(f"  {'':17} {escape(finding.remedy)}")
