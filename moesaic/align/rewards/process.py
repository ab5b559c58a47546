"""Process rewards ("Let's Verify Step by Step"): the scores of an answer's steps as one number."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from moesaic.align.rewards import Reward
from moesaic.worlds.judges import Answer


@dataclass(frozen=True)
class Process(Reward):
    """The scores, from 0 to 1, come with the answer as `facts["steps"]`: from a reward model, a judge or a tool.

    A chain is as good as its worst step (`min`), as all its steps together (`product`), as where it ends (`last`).
    """

    by: Literal["min", "product", "last", "mean"] = "min"

    def __call__(self, answer: Answer) -> float:
        steps = [float(step) for step in answer.facts.get("steps", ())]
        if not steps:
            raise ValueError("the answer came without scores of its steps")
        if not all(0 <= step <= 1 for step in steps):
            raise ValueError("a step's score is not between 0 and 1")
        if self.by == "min":
            return min(steps)
        if self.by == "product":
            return math.prod(steps)
        return steps[-1] if self.by == "last" else sum(steps) / len(steps)
