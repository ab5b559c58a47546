"""What the held-out slides of a run looked like at its start, and look like now: pictures, and a page of them.

write(Path("out/slides"), answers)      # out/slides/slides/1-start.png, 1-now.png, ..., and out/slides/slides.html
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from moesaic import atomic
from moesaic.errors import UserError
from moesaic.report.page import page, section, table
from moesaic.worlds.browser.chromium_window import Unresponsive
from moesaic.worlds.slides.layout import Layout
from moesaic.worlds.slides.rendering import layouts, picture

SHOWN = 4
FILE, FOLDER = "slides.html", "slides"


def write(out: Path, asked: Sequence[str], slides: Sequence[str], wanted: Sequence[Mapping[str, Any] | None]) -> None:
    """The first few of them. What there is of an earlier look stays as the start."""
    folder = out / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for number, (question, slide, content) in enumerate(zip(asked[:SHOWN], slides, wanted), 1):
        try:
            (layout,), shot = layouts([slide]), picture(slide)
        except (Unresponsive, UserError):
            continue  # no picture this time; the reward says why, and the run goes on
        for when in ("start", "now"):
            if when == "now" or not (folder / f"{number}-start.png").exists():
                atomic.write_bytes(folder / f"{number}-{when}.png", shot)
        pictures = "".join(_image(folder / f"{number}-{when}.png", when) for when in ("start", "now"))
        rows.append(section(question.replace("\n", " · "), "", f"{_numbers(layout, content)}{pictures}"))
    atomic.write_text(out / FILE, page(f"Slides of {out.name}: at the start, and now", "".join(rows)))


def _image(file: Path, name: str) -> str:
    shot = base64.b64encode(file.read_bytes()).decode()
    return f'<figure><img alt="{name}" src="data:image/png;base64,{shot}"><figcaption>{name}</figcaption></figure>'


def _numbers(layout: Layout | Exception, wanted: Mapping[str, Any] | None) -> str:
    if isinstance(layout, Exception):
        return f"<p>{escape(str(layout))}</p>"
    scores = (layout.collisions(), layout.aspect(), layout.whitespace(), layout.balance())
    content = layout.content(wanted) if wanted is not None else 0.0
    head = ("content", "pairs that collide", "collisions", "aspect", "whitespace", "balance")
    return table(head, [(f"{content:.2f}", str(layout.colliding), *(f"{score:.2f}" for score in scores))])
