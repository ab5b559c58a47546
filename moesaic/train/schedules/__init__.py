"""Learning-rate schedules, one file each: the learning rate after warm-up, as a share of the peak.

    schedule = recipe.build("schedule", Schedule)
    rates = curve(schedule, steps=1000, warmup=50, peak=3e-3)     # one learning rate for each step of the run

The warm-up is the trainer's, the same for every schedule: equal steps up from near zero to the schedule's first rate.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Curve = NDArray[np.float64]


class Schedule:
    """A shape of the learning rate over the steps after warm-up."""

    def factor(self, step: int, steps: int) -> float:
        """The learning rate at `step` of `steps`, counted from 0 after warm-up; 1 is the peak.

        `step` may equal `steps`: where the schedule arrives once the last step, number `steps - 1`, has been taken.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class ToFloor(Schedule):
    """One that ends at `floor`, a share of the peak: where the rate is once the last step has been taken."""

    floor: float = 0.0

    def __post_init__(self) -> None:
        need("floor", self.floor, 0, 1)


def curve(schedule: Schedule, steps: int, warmup: int = 0, peak: float = 1.0) -> Curve:
    """The learning rate of every step of a run of `steps`, of which the first `warmup` rise to the schedule's first."""
    if not 0 <= warmup < steps:
        raise ValueError(f"the warm-up must be shorter than the run, found {warmup} of {steps} steps")
    after = steps - warmup
    factors = np.array([schedule.factor(step, after) for step in range(after)], dtype=np.float64)
    rise = factors[0] * np.arange(1, warmup + 1) / (warmup + 1)
    return peak * np.concatenate([rise, factors])


def progress(step: int, steps: int, share: float = 1.0) -> float:
    """How much of the last `share` of the run is behind `step`: 0 until it begins, 1 once every step is taken."""
    assert 0 <= step <= steps and steps > 0, f"step {step} of {steps}"
    return max(0.0, (step - (1 - share) * steps) / (share * steps)) if step < steps else 1.0


def need(name: str, value: float, low: float, high: float, above: bool = False) -> None:
    """Refuse an option outside low..high; with `above`, `low` itself is refused too."""
    if not (low < value if above else low <= value) or not value <= high:  # written so that nan is refused
        allowed = f"above {low:g} and at most {high:g}" if above else f"from {low:g} to {high:g}"
        raise ValueError(f"{name} must be {allowed}, found {value:g}")
