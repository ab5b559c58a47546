"""The peak, then a power decay (1 - p)^power to `floor` over the last `decay` share of the steps.

    moesaic train recipes/tiny.yaml --out out/run "schedule={name: wsd_power, decay: 0.3, power: 1.5}"

A closed form near the schedules that the multi-power law finds best (A Multi-Power Law for Loss Curve Prediction): the
default power of 1.5 falls faster at first than a straight line, and arrives at the floor gently.
"""

from __future__ import annotations

from dataclasses import dataclass

from moesaic.train.schedules import Schedule, need, progress


@dataclass(frozen=True)
class WarmupStablePowerDecay(Schedule):
    decay: float = 0.2
    floor: float = 0.0
    power: float = 1.5

    def __post_init__(self) -> None:
        need("decay", self.decay, 0, 1, above=True)
        need("floor", self.floor, 0, 1)
        need("power", self.power, 0, 10, above=True)

    def factor(self, step: int, steps: int) -> float:
        return float(self.floor + (1 - self.floor) * (1 - progress(step, steps, self.decay)) ** self.power)
