"""The peak, then a short way down to a rate that still learns (How Learning Rate Decay Wastes Your Best Data).

    moesaic train recipes/tiny.yaml --out out/run "schedule={name: moderate, end: 0.33, decay: 0.2}"

For a curriculum whose best data comes last: a rate near zero would learn little from it. What the missing decay would
have gained comes from averaging the weights of the last checkpoints, which the trainer does.
"""

from __future__ import annotations

from dataclasses import dataclass

from moesaic.train.schedules import Schedule, need, progress


@dataclass(frozen=True)
class Moderate(Schedule):
    end: float = 1 / 3
    decay: float = 0.2

    def __post_init__(self) -> None:
        need("end", self.end, 0, 1, above=True)
        need("decay", self.decay, 0, 1, above=True)

    def factor(self, step: int, steps: int) -> float:
        return 1 - (1 - self.end) * progress(step, steps, self.decay)
