"""Figures of runs, which tests put together and do not render: rendering takes longer than all of a tiny run."""

from __future__ import annotations

import base64
import sys
from pathlib import Path
from typing import Any

# One white pixel.
BLANK = base64.b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGP4DwABAQEANTWGuQAAAABJRU5ErkJggg==")


def leave_blank(rendered: bool = False) -> None:
    """Save figures as one white pixel from now on, or as they are; nothing to do before somebody imports matplotlib."""
    figure: Any = sys.modules.get("matplotlib.figure")
    if figure is not None:
        saved = figure.Figure.__dict__.get("rendered", figure.Figure.savefig)
        figure.Figure.rendered = saved
        figure.Figure.savefig = saved if rendered else blank


def blank(figure: object, out: Any, **options: object) -> None:
    if hasattr(out, "write"):
        out.write(BLANK)
    else:
        Path(out).write_bytes(BLANK)
