"""How sure a share of right answers is."""

from __future__ import annotations

import math

SURE = 1.959964  # standard deviations of 95 %


def wilson(right: float, count: int) -> tuple[float, float]:
    """Wilson's interval of a share, at 95 %: sensible near 0 and 1, and for few answers too. Answers may be right in
    part; the interval is then wider than it need be."""
    share, square = right / count, SURE**2
    middle = (share + square / (2 * count)) / (1 + square / count)
    reach = SURE / (1 + square / count) * math.sqrt(share * (1 - share) / count + square / (4 * count**2))
    # None right, or all: there rounding would leave a trace where the bound is exact.
    return (middle - reach if right > 0 else 0.0), (middle + reach if right < count else 1.0)
