"""Interleave several pools at fixed ratios, evenly; any span of the result is computed without the one before it.

Slot u belongs to the pool whose share of the circle holds the point u * golden ratio (mod 1): the most evenly spread of
all sequences. How many of the first u slots belong to each is a sum of floors, which Euclid's algorithm gives in a
few dozen steps. All in whole numbers of 64 bits, so that every machine agrees.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np

CIRCLE = 1 << 64
STEP = 0x9E3779B97F4A7C15  # the golden ratio's fraction of the circle


class Interleaving:
    """`weights` need not sum to one. `offset` is where on the circle slot 0 lies."""

    def __init__(self, weights: Sequence[float], offset: int = 0) -> None:
        assert weights and min(weights) >= 0 and sum(weights) > 0
        total = sum(weights)
        inner = [min(CIRCLE, round(at / total * CIRCLE)) for at in accumulate(weights)][:-1]
        self.bounds = [0, *inner, CIRCLE]
        self.offset = offset % CIRCLE
        # The end of the circle does not fit into 64 bits: pools of no weight at the end are never searched for.
        self._inner = np.array([bound for bound in inner if bound < CIRCLE], np.uint64)

    def owners(self, first: int, count: int) -> np.ndarray:
        """The pool of each slot from `first` to `first + count`."""
        start = np.uint64((self.offset + first * STEP) % CIRCLE)
        with np.errstate(over="ignore"):  # going round the circle is the point
            points = start + np.arange(count, dtype=np.uint64) * np.uint64(STEP)
        return np.searchsorted(self._inner, points, side="right")

    def counts(self, slots: int) -> list[int]:
        """How many of the first `slots` slots belong to each pool."""
        whole = _floor_sum(slots, CIRCLE, STEP, self.offset)
        below = [whole - _floor_sum(slots, CIRCLE, STEP, self.offset + CIRCLE - bound) + slots for bound in self.bounds]
        return [high - low for low, high in pairwise(below)]


def _floor_sum(n: int, m: int, a: int, b: int) -> int:
    """The sum of (a * i + b) // m for i from 0 to n - 1."""
    total = 0
    while n:
        total += (n - 1) * n // 2 * (a // m) + n * (b // m)
        a, b = a % m, b % m
        last = a * n + b
        # The points below the line, counted along the other axis: a smaller sum of the same kind.
        n, b = divmod(last, m)
        m, a = a, m
        if not m:
            break
    return total
