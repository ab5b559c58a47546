"""What the environment itself gave for the answer, all turns together (stage policy with an `environment`)."""

from __future__ import annotations

from dataclasses import dataclass

from moesaic.align.rewards import Reward
from moesaic.worlds.judges import Answer


@dataclass(frozen=True)
class Given(Reward):
    def __call__(self, answer: Answer) -> float:
        if "environment" not in answer.facts:
            raise ValueError("the answer was not given in an environment")
        return float(answer.facts["environment"])
