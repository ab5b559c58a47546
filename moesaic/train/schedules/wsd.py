"""Warm-up, stable, decay: the peak until the last `decay` share of the steps, then a fall to `floor` (MiniCPM).

    moesaic train recipes/tiny.yaml --out out/run "schedule={name: wsd, decay: 0.2, shape: sqrt}"

With p from 0 to 1 over the decay, the shapes are linear, 1 - p; sqrt, 1 - √p (Scaling Laws and Compute-Optimal Training
Beyond Fixed Training Durations); cosine, half a wave; exponential, floor^p (MiniCPM's own), which needs a floor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from moesaic.train.schedules import Schedule, need, progress


@dataclass(frozen=True)
class WarmupStableDecay(Schedule):
    decay: float = 0.2
    floor: float = 0.0
    shape: Literal["linear", "sqrt", "cosine", "exponential"] = "linear"

    def __post_init__(self) -> None:
        need("decay", self.decay, 0, 1, above=True)
        need("floor", self.floor, 0, 1)
        if self.shape == "exponential" and self.floor == 0:
            raise ValueError("an exponential decay never arrives at zero; give it a floor, such as floor: 0.1")

    def factor(self, step: int, steps: int) -> float:
        p = progress(step, steps, self.decay)
        match self.shape:
            case "exponential":
                return float(self.floor**p)
            case "linear":
                left = 1 - p
            case "sqrt":
                left = 1 - math.sqrt(p)
            case "cosine":
                left = (1 + math.cos(math.pi * p)) / 2
        return self.floor + (1 - self.floor) * left
