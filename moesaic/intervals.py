"""A mean with its 95 % interval, by Student's t: what a few seeds say, and how far it can be trusted.

across([0.61, 0.58, 0.66])         # Across(mean=0.617, half=0.100): "0.617 ± 0.100"
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from scipy.special import stdtrit

LEVEL = 0.95


class Across(NamedTuple):
    """Over seeds, say. Of a single value nothing is known about how far it may be off: `half` is nan."""

    mean: float
    half: float  # of the interval's width

    def __str__(self) -> str:
        return f"{self}"

    def __format__(self, sign: str) -> str:
        mean = f"{self.mean:{sign}.3f}"
        return mean if math.isnan(self.half) else f"{mean} ± {self.half:.3f}"

    def plain(self) -> dict[str, float | None]:
        """For JSON, which has no nan."""
        return {"mean": self.mean, "half": None if math.isnan(self.half) else self.half}


def across(values: Sequence[float]) -> Across:
    count = len(values)
    if count < 2:
        return Across(values[0], math.nan)
    quantile = float(stdtrit(count - 1, (1 + LEVEL) / 2))
    return Across(statistics.mean(values), quantile * statistics.stdev(values) / math.sqrt(count))
