"""The peak learning rate in every step.

    moesaic train recipes/tiny.yaml --out out/run schedule=constant

The run that a law of loss curves is best fitted on, beside one that decays.
"""

from __future__ import annotations

from dataclasses import dataclass

from moesaic.train.schedules import Schedule


@dataclass(frozen=True)
class Constant(Schedule):
    def factor(self, step: int, steps: int) -> float:
        return 1.0
