"""The progress bar of a preparation on standard error, and its summary at the end."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from moesaic.data.preparation.prepare import Prepared, Status
from moesaic.units import plural


@contextmanager
def progress_bar() -> Iterator[Callable[[Status], None]]:
    """Shows each status as a progress bar, on a terminal."""
    console = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[made]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    )
    with bar:
        task = bar.add_task("listing the sources", total=None, made="")

        def on_status(status: Status) -> None:
            made = _amount(status.tokens, status.documents) if status.documents else ""
            bar.update(task, description=status.doing, completed=status.done, total=max(status.size, 1), made=made)

        yield on_status


def summary(prepared: Prepared, recipe: Path) -> str:
    """What was made, what was left out and why, and what to do next."""
    manifest = prepared.manifest
    head = "is prepared already, and nothing has changed" if prepared.already else "is ready"
    lines = [f"{prepared.directory} {head}: {_amount(manifest['tokens'], manifest['documents'])}"]
    for counts in prepared.counts:
        left = {
            "held out": counts.held_out,
            "duplicate": counts.duplicate,
            "near-duplicate": counts.near_duplicate,
            "empty": counts.empty,
            "broken": counts.broken,
        }
        notes = "".join(f", {number:,} {name}" for name, number in left.items() if number)
        per = counts.characters / max(counts.tokens, 1)
        lines.append(
            f"  {counts.name}: {_amount(counts.tokens, counts.documents)} ({per:.2f} characters per token){notes}"
        )
        lines += [f"    broken: {text}" for text in counts.first_broken]
        if counts.broken > len(counts.first_broken):
            lines.append(f"    all {counts.broken:,} are listed in {prepared.directory}/broken.jsonl")
    lines.append(f"  vocabulary {manifest['vocabulary']:,}; columns: {', '.join(manifest['columns']) or 'none'}")
    next_command = ["moesaic", "train", str(recipe), "--out", "DIR", f"train.data={prepared.directory}"]
    lines.append(f"Next: {shlex.join(next_command)}")
    return "\n".join(lines)


def _amount(tokens: int, documents: int) -> str:
    return f"{plural(tokens, 'token')} in {plural(documents, 'document')}"
