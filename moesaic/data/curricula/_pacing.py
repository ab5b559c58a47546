"""DeepSpeed Data Efficiency's pacing: how much of the sorted pool is open after a part of the run.

    linear   start + (1 - start) * t / until
    root     start + (1 - start) * (t / until) ** (1 / degree)        opens fast, then slower
    steps    the shares of `shares`, from the moments of `at` on

The first two are followed in `stages` equal steps. Documents that were opened together are drawn from evenly, each such
group by itself, so that easy documents are repeated while the hard ones are still closed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from moesaic.data.curricula import Curriculum


@dataclass(frozen=True)
class Paced(Curriculum):
    pacing: Literal["linear", "root", "steps"] = "linear"
    start: float = 0.1  # share that is open at first
    until: float = 0.5  # part of the run after which all is open
    degree: float = 2.0
    stages: int = 10
    at: tuple[float, ...] = ()
    shares: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not (0 < self.start <= 1 and 0 < self.until <= 1):
            raise ValueError("start and until are shares, above 0 and at most 1")
        if self.degree <= 0 or not 1 <= self.stages <= 1000:
            raise ValueError("degree must be above 0, and stages from 1 to 1000")
        if self.pacing == "steps":
            rising = all(list(steps) == sorted(set(steps)) for steps in (self.at, self.shares))
            if not self.at or len(self.at) != len(self.shares) or not rising or self.at[0] != 0:
                raise ValueError("pacing steps needs at and shares, as many of each, both rising, at from 0")
            if self.at[-1] >= 1 or self.shares[0] <= 0 or self.shares[-1] != 1:
                raise ValueError("at must lie below 1, and shares above 0, the last of them 1")
        elif self.at or self.shares:
            raise ValueError("at and shares are for pacing steps")

    def share(self, done: float) -> float:
        """The open share after a part of the run, before it is cut into stages."""
        if self.pacing == "steps":
            return [share for at, share in zip(self.at, self.shares) if at <= done][-1]
        degree = self.degree if self.pacing == "root" else 1.0
        return self.start + (1 - self.start) * min(done / self.until, 1.0) ** (1 / degree)

    def openings(self) -> list[tuple[float, float]]:
        if self.pacing == "steps":
            return list(zip(self.at, self.shares))
        moments = [self.until * stage / self.stages for stage in range(self.stages)]
        return [*((moment, self.share(moment)) for moment in moments), (self.until, 1.0)]
