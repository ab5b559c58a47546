"""Figures of runs, which take longer than all of a tiny run: never rendered, and put together once for each form.

A run's figure is made of its metrics and events. Its form is which of them there are: a run with another column, with
another kind of event, or that misses a value where others have one, is put together as it is outside of tests.
"""

from __future__ import annotations

import base64
import functools
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

# One white pixel.
BLANK = base64.b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGP4DwABAQEANTWGuQAAAABJRU5ErkJggg==")
FEW = 4  # lines: a curve of fewer is another form
PLOTTED = {
    "moesaic.train.report.plot": ("plot_run", "training.png"),
    "moesaic.align.align": ("plot_alignment", "alignment.png"),
}
looked_at = False


def leave_blank(rendered: bool = False) -> None:
    """Save figures as one white pixel from now on, or as they are; nothing to do before somebody has imported what
    makes them."""
    global looked_at
    looked_at = rendered
    figure: Any = sys.modules.get("matplotlib.figure")
    if figure is not None:
        saved = figure.Figure.__dict__.get("rendered", figure.Figure.savefig)
        figure.Figure.rendered = saved
        figure.Figure.savefig = saved if rendered else blank
    for module, (name, file) in PLOTTED.items():
        plain = getattr(sys.modules.get(module), name, None)
        if plain is not None and not hasattr(plain, "__wrapped__"):
            setattr(sys.modules[module], name, once_for_each_form(plain, file))


def blank(figure: object, out: Any, **options: object) -> None:
    if hasattr(out, "write"):
        out.write(BLANK)
    else:
        Path(out).write_bytes(BLANK)


def once_for_each_form(plain: Callable[..., Path | None], file: str) -> Callable[..., Path | None]:
    made: dict[Any, bool] = {}

    @functools.wraps(plain)
    def plot(directory: str | Path, *out: Any) -> Path | None:
        form = None if out or looked_at else form_of(Path(directory))
        if form is None or form not in made:
            found = plain(directory, *out)
            made[form] = found is not None
            return found
        if not made[form]:
            return None
        blank(None, Path(directory) / file)
        return Path(directory) / file

    return plot


def form_of(directory: Path) -> Any:
    from moesaic.train.report.metrics import read_events, read_metrics

    lines = list(read_metrics(directory))
    missing = {
        key for line in lines for key, value in line.items() if value is None or value != value or value == math.inf
    }
    columns = frozenset(key for line in lines for key in line)
    return (
        columns,
        frozenset(missing),
        frozenset(event["kind"] for event in read_events(directory)),
        min(len(lines), FEW),
    )
