"""Half a cosine wave from the peak to `floor` (SGDR, without restarts).

moesaic train recipes/tiny.yaml --out out/run "schedule={name: cosine, floor: 0.1}"
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from moesaic.train.schedules import ToFloor, progress


@dataclass(frozen=True)
class Cosine(ToFloor):
    floor: float = 0.1

    def factor(self, step: int, steps: int) -> float:
        return self.floor + (1 - self.floor) * (1 + math.cos(math.pi * progress(step, steps))) / 2
