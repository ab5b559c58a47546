"""A straight fall from the peak to `floor`.

moesaic train recipes/tiny.yaml --out out/run "schedule={name: linear, floor: 0.05}"
"""

from __future__ import annotations

from moesaic.train.schedules import ToFloor, progress


class Linear(ToFloor):
    def factor(self, step: int, steps: int) -> float:
        return 1 - (1 - self.floor) * progress(step, steps)
