"""What a model is: parameters, layers, memory, and its life so far.

moesaic show out/smollm2
moesaic show out/smollm2 --json
"""

from __future__ import annotations

from moesaic.cli.app import JsonFlag, print_json
from moesaic.cli.options import ModelDirectory

ORDER = 20


def command(
    directory: ModelDirectory,
    json: JsonFlag = False,
) -> None:
    """Show what a model is: parameters, layers, memory, and its life so far."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from moesaic.report.model_summary import model_summary, rows
    from moesaic.train.report.metrics import METRICS, read_metrics
    from moesaic.train.report.terminal_plot import loss_plot

    summary = model_summary(directory)
    if json:
        print_json(summary)
        return
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in rows(summary):
        table.add_row(f"[bold]{escape(name)}[/bold]", escape(value))
    Console(highlight=False).print(table)
    if (directory / METRICS).is_file():
        print(f"\n{loss_plot(read_metrics(directory))}")
