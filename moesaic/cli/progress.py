"""The progress bar of a command, on standard error.

with progress_bar(disable=json) as progress:
    progress("quantizing", 3, 24)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from moesaic.cli.app import stopped

if TYPE_CHECKING:
    from moesaic.data.preparation.prepare import Status


@contextmanager
def progress_bar(disable: bool) -> Iterator[Callable[[str, int, int], None]]:
    """What is called with what is being done, how much of it is done, and how much there is."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=disable) as bar:
        task = bar.add_task("reading")

        def progress(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total)

        yield progress


@contextmanager
def resumable(command: str, out: Path, has_progress: Callable[[Path], bool]) -> Iterator[Callable[[Status], None]]:
    """Fill a directory that nobody else fills meanwhile, under a progress bar; Ctrl-C says how it is resumed."""
    from moesaic.atomic import exclusive
    from moesaic.data.preparation import report

    try:
        with exclusive(out), report.progress_bar() as on_status:
            yield on_status
    except KeyboardInterrupt:
        raise stopped(command, out, has_progress(out)) from None
