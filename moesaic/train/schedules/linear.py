"""A straight fall from the peak to `floor`.

    moesaic train recipes/tiny.yaml --out out/run "schedule={name: linear, floor: 0.05}"

The floor is a share of the peak, and is where the rate is once the last step has been taken.
"""

from __future__ import annotations

from dataclasses import dataclass

from moesaic.train.schedules import Schedule, need, progress


@dataclass(frozen=True)
class Linear(Schedule):
    floor: float = 0.0

    def __post_init__(self) -> None:
        need("floor", self.floor, 0, 1)

    def factor(self, step: int, steps: int) -> float:
        return 1 - (1 - self.floor) * progress(step, steps)
