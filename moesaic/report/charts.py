"""Charts as SVG that takes its colours from the page around it, so that one file is right in the light and in the dark.

lines([Curve("loss", steps, losses)], "Loss", "step")
shares(loads_TE, "Which experts work", "step")
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]

WIDTH, HEIGHT = 640, 240
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 12, 34
POINTS = 400  # of a curve; a picture shows no more


@dataclass(frozen=True)
class Curve:
    name: str
    x: Sequence[float] | Numbers
    y: Sequence[float] | Numbers
    kind: str = "line"  # or "faint", "dashed", "dots"

    def known(self) -> tuple[Numbers, Numbers]:
        x, y = np.asarray(self.x, np.float64), np.asarray(self.y, np.float64)
        there = np.isfinite(x) & np.isfinite(y)
        x, y = x[there], y[there]
        if len(x) > POINTS:
            chosen = np.unique(np.linspace(0, len(x) - 1, POINTS).round().astype(int))
            x, y = x[chosen], y[chosen]
        return x, y


def lines(
    curves: Sequence[Curve],
    title: str,
    across: str,
    *,
    from_zero: bool = False,
    percent: bool = False,
    logarithmic: bool = False,
) -> str:
    """Curves over a common axis, each with its name at the top; a table for who cannot see them is the caller's."""
    found = [(curve, *curve.known()) for curve in curves]
    found = [(curve, x, y) for curve, x, y in found if len(x)]
    if not found:
        return ""
    scale = np.log if logarithmic else np.asarray
    left = min(float(x.min()) for _, x, _ in found)
    right = max(float(x.max()) for _, x, _ in found)
    low = 0.0 if from_zero else min(float(scale(y).min()) for _, _, y in found)
    high = 1.0 if percent else max(float(scale(y).max()) for _, _, y in found)
    high = high if high > low else low + 1.0

    def place(x: float, y: float) -> str:
        across = LEFT + (x - left) / ((right - left) or 1.0) * (WIDTH - LEFT - RIGHT)
        up = HEIGHT - BOTTOM - (float(scale(y)) - low) / (high - low) * (HEIGHT - TOP - BOTTOM)
        return f"{across:.1f},{up:.1f}"

    drawn, names, colour = [], [], 0
    for curve, x, y in found:
        style = f"c{colour % 6}"
        colour += curve.kind != "faint"  # what is drawn faintly belongs to the curve after it
        points = [place(float(a), float(b)) for a, b in zip(x, y)]
        if curve.kind == "dots" or len(points) == 1:
            drawn += [
                '<circle class="{} dot" r="3.5" cx="{}" cy="{}"/>'.format(style, *point.split(",")) for point in points
            ]
        if curve.kind != "dots" or len(points) > 1:
            drawn.append(f'<polyline class="{style} {curve.kind}" points="{" ".join(points)}"/>')
        if curve.kind != "faint":
            names.append(f'<span class="{style}">{escape(curve.name)}</span>')
    values = [math.exp(at) if logarithmic else at for at in np.linspace(low, high, 5)]
    grid = [
        _level(HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM), f"{value:.0%}" if percent else tick(value))
        for share, value in zip(np.linspace(0, 1, 5), values)
    ]
    return _framed(title, across, left, right, [*grid, *drawn], names)


def shares(loads_TE: Sequence[Sequence[float]], x: Sequence[float], title: str, across: str) -> str:
    """A row for each expert, darker where it works more; an even share is the middle of the scale."""
    loads = np.asarray(loads_TE, np.float64)
    if loads.ndim != 2 or not loads.size:
        return ""
    loads = loads / np.maximum(loads.sum(1, keepdims=True), 1e-9) * loads.shape[1]
    tall, wide = (HEIGHT - TOP - BOTTOM) / loads.shape[1], (WIDTH - LEFT - RIGHT) / loads.shape[0]
    cells = [
        f'<rect class="load" x="{LEFT + t * wide:.1f}" y="{TOP + e * tall:.1f}" width="{wide + 0.3:.1f}" '
        f'height="{max(tall - 1, 0.5):.1f}" style="opacity:{min(loads[t, e] / 2, 1):.2f}"/>'
        for t in range(loads.shape[0])
        for e in range(loads.shape[1])
    ]
    labels = [
        f'<text class="tick" x="{LEFT - 6}" y="{TOP + (e + 0.5) * tall + 4:.1f}" text-anchor="end">{e}</text>'
        for e in range(0, loads.shape[1], max(1, loads.shape[1] // 8))
    ]
    names = ['<span class="c0">darker: more of the tokens</span>']
    return _framed(title, across, float(x[0]), float(x[-1]), [*cells, *labels], names)


def tick(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _level(y: float, text: str) -> str:
    return (
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        f'<text class="tick" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{text}</text>'
    )


def _framed(title: str, across: str, left: float, right: float, inside: Sequence[str], names: Sequence[str]) -> str:
    base, middle = HEIGHT - 14, (LEFT + WIDTH - RIGHT) // 2
    ends = (
        f'<text class="tick" x="{LEFT}" y="{base}">{left:,.0f}</text>'
        f'<text class="tick" x="{middle}" y="{base}" text-anchor="middle">{escape(across)}</text>'
        f'<text class="tick" x="{WIDTH - RIGHT}" y="{base}" text-anchor="end">{right:,.0f}</text>'
    )
    return (
        f'<figure><figcaption>{escape(title)}</figcaption><p class="names">{" ".join(names)}</p>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">'
        f"{''.join(inside)}{ends}</svg></figure>"
    )
