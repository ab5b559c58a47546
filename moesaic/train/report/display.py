"""The progress line of a run: step, loss, learning rate, throughput, and the time that is left."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console, ConsoleOptions
from rich.segment import Segment
from rich.style import Style

from moesaic.units import readable_duration

BAR = 30  # columns at most
SEPARATOR = "  "


class RunningMean:
    """Exponential moving average over about `span` values, without bias towards zero at the start."""

    def __init__(self, span: int) -> None:
        self._keep = 1 - 1 / span
        self._sum = self._weight = 0.0

    def add(self, value: float | None) -> None:
        if value is not None and math.isfinite(value):
            self._sum = self._keep * self._sum + value
            self._weight = self._keep * self._weight + 1

    @property
    def value(self) -> float | None:
        return self._sum / self._weight if self._weight else None


class Progress:
    """What the progress line shows; renders itself in the width it is given."""

    def __init__(self, steps: int, start: int = 0) -> None:
        self.steps, self.step = steps, start
        self._loss, self._throughput, self._seconds, self._mfu = (
            RunningMean(20),
            RunningMean(20),
            RunningMean(20),
            RunningMean(20),
        )
        self._lr: float | None = None
        self._skipped = 0

    def update(self, line: Mapping[str, Any]) -> None:
        self.step, self._lr = line["step"], line["lr"]
        self._loss.add(line["loss"])
        self._throughput.add(line["tokens_per_second"])
        self._seconds.add(line["seconds"])
        self._mfu.add(line.get("mfu"))
        self._skipped += bool(line["skipped"])

    def rewind(self, step: int) -> None:
        self.step, self._loss = step, RunningMean(20)

    @property
    def left(self) -> float | None:
        """Seconds to the last step, at the current throughput."""
        return None if self._seconds.value is None else self._seconds.value * max(0, self.steps - self.step)

    def fields(self) -> list[tuple[int, str]]:
        """The fields, in order, each with its rank: in a narrow terminal the highest ranks are dropped."""
        found = [(0, f"step {self.step:,}/{self.steps:,}")]
        if self._loss.value is not None:
            found.append((0, f"loss {self._loss.value:.4f}"))
        if self._lr is not None:
            found.append((4, f"lr {self._lr:.2e}"))
        if self._throughput.value is not None:
            found.append((2, f"{self._throughput.value:,.0f} tokens/s"))
        if self._mfu.value is not None:
            found.append((3, f"MFU {self._mfu.value:.0%}"))
        if self._skipped:
            found.append((5, f"{self._skipped:,} skipped"))
        if self.left is not None and self.step < self.steps:
            found.append((1, f"{readable_duration(self.left)} left"))
        return found

    def plain(self) -> str:
        return SEPARATOR.join(text for _, text in self.fields())

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterable[Segment]:
        width, fields = options.max_width - 1, self.fields()
        while len(fields) > 1 and len(SEPARATOR.join(text for _, text in fields)) > width:
            fields.remove(max(fields))
        text = SEPARATOR.join(text for _, text in fields)
        room = min(BAR, width - len(text) - len(SEPARATOR))
        if room >= 8:
            full = round(room * min(1.0, self.step / max(1, self.steps)))
            ascii_only = console.options.ascii_only
            done, open_ = ("#", "-") if ascii_only else ("━", "━")
            yield Segment(done * full, Style(color="green"))
            yield Segment(open_ * (room - full), Style(color="bright_black"))
            yield Segment(SEPARATOR)
        yield Segment(text[:width])


def format_loss(value: float | None) -> str:
    return "?" if value is None else f"{value:.3f}"
