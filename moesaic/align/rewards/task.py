"""Right by the family of tasks the question came from (reasoning-gym's own verifiers)."""

from __future__ import annotations

from dataclasses import dataclass

from moesaic.align.rewards import Reward
from moesaic.data.tasks import score
from moesaic.worlds.example import Example
from moesaic.worlds.judges import Answer
from moesaic.worlds.judges.answer_part import after_thought


@dataclass(frozen=True)
class TaskScore(Reward):
    partial: bool = False  # whether half right counts

    def __call__(self, answer: Answer) -> float:
        if answer.task is None:
            raise ValueError("the question did not come from a family of tasks")
        value = score(answer.task, after_thought(answer.text))
        return value if self.partial else float(value >= 1.0)

    def lacks(self, example: Example) -> str:
        return "a family of tasks (builtin:FAMILY) that it is from" if example.task is None else ""
