"""Half a cosine wave from the peak to `floor` (SGDR, without restarts).

    moesaic train recipes/tiny.yaml --out out/run "schedule={name: cosine, floor: 0.1}"

The floor is a share of the peak, and is where the rate is once the last step has been taken.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from moesaic.train.schedules import Schedule, need, progress


@dataclass(frozen=True)
class Cosine(Schedule):
    floor: float = 0.1

    def __post_init__(self) -> None:
        need("floor", self.floor, 0, 1)

    def factor(self, step: int, steps: int) -> float:
        return self.floor + (1 - self.floor) * (1 + math.cos(math.pi * progress(step, steps))) / 2
