"""A loss curve in a terminal, plotted with braille dots: two by four in each character.

print(loss_plot(read_metrics("out/tiny")))
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from moesaic.train.report.display import format_loss
from moesaic.units import readable_count, readable_duration

DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # braille's bits, by column and row
BLANK = 0x2800


def loss_plot(metrics: Sequence[Mapping[str, Any]], width: int = 64, height: int = 6) -> str:
    """The loss over the steps, and the run in a sentence; empty where there is nothing to draw."""
    points = [(line["step"], line["loss"]) for line in metrics if line.get("loss") is not None]
    points = [(step, loss) for step, loss in points if math.isfinite(loss)]
    if not points:
        return ""
    first, last = points[0][0], points[-1][0]
    columns = _columns(points, 2 * width)
    known = [value for value in columns if value is not None]
    low, high = min(known), max(known)
    margin = max(len(format_loss(low)), len(format_loss(high)))
    rows = []
    for place, cells in enumerate(_draw(columns, low, high, height)):
        label = format_loss(high) if place == 0 else format_loss(low) if place == height - 1 else ""
        rows.append(f"{label:>{margin}} {'┤' if label else '│'}{cells}".rstrip(f" {chr(BLANK)}"))
    rows.append(f"{'':>{margin}} └{'─' * width}")
    begin, end = f"step {first:,}", f"{last:,}"
    rows.append(f"{'':>{margin}}  {begin}{end:>{max(1, width - len(begin))}}")
    return "\n".join([*rows, sentence(metrics)])


def sentence(metrics: Sequence[Mapping[str, Any]]) -> str:
    losses = [line["loss"] for line in metrics if line.get("loss") is not None]
    tokens, seconds = metrics[-1].get("tokens", 0), sum(line.get("seconds", 0.0) for line in metrics)
    text = f"loss {format_loss(losses[0])} to {format_loss(losses[-1])} in {metrics[-1]['step']:,} steps"
    text += f", {readable_count(tokens)} tokens"
    if seconds:
        text += f", {readable_duration(seconds)}, {tokens / seconds:,.0f} tokens/s"
    skipped = sum(bool(line.get("skipped")) for line in metrics)
    return text + (f", {skipped:,} skipped" if skipped else "")


def _columns(points: Sequence[tuple[int, float]], count: int) -> list[float | None]:
    """The mean loss in each of `count` equal stretches of steps; a stretch without a step is drawn between its
    neighbours."""
    first, last = points[0][0], points[-1][0]
    sums, sizes = [0.0] * count, [0] * count
    for step, loss in points:
        column = (step - first) * (count - 1) // (last - first) if last > first else 0
        sums[column] += loss
        sizes[column] += 1
    means = [total / size if size else None for total, size in zip(sums, sizes)]
    filled = [column for column, mean in enumerate(means) if mean is not None]
    for left, right in pairwise(filled):
        a, b = means[left], means[right]
        assert a is not None and b is not None
        for column in range(left + 1, right):
            means[column] = a + (b - a) * (column - left) / (right - left)
    return means


def _draw(columns: Sequence[float | None], low: float, high: float, height: int) -> list[str]:
    cells = [[BLANK] * (len(columns) // 2) for _ in range(height)]
    before: int | None = None
    for x, value in enumerate(columns):
        if value is None:
            continue
        if low > 0:  # logarithmic, so that the first fall does not press all the rest into one row
            share = math.log(high / value) / math.log(high / low) if high > low else 0.5
        else:
            share = (high - value) / (high - low) if high > low else 0.5
        y = round(share * (4 * height - 1))
        # Joined to the last point, so that a steep fall is a line and not scattered dots.
        for dot in range(min(y, y if before is None else before + (y > before)), max(y, before or y) + 1):
            cells[dot // 4][x // 2] |= DOTS[x % 2][dot % 4]
        before = y
    return ["".join(map(chr, row)) for row in cells]
