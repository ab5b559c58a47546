"""The share of held-out questions a model answers rightly, greedily: the curve that says whether alignment works."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moesaic.align.environments import Environment
from moesaic.align.environments._playing import play, players
from moesaic.align.examples import BUILTIN, TaskExamples
from moesaic.align.rewards.task import TaskScore
from moesaic.align.rollouts.rollout import roll
from moesaic.model.transformer import Model
from moesaic.serve.core.engine import Engine
from moesaic.worlds.example import Example


class Accuracy:
    """Only families of tasks know held-out questions and what is right; other sources have no say."""

    def __init__(self, examples: Sequence[Example], max_tokens: int, environment: Environment | None = None) -> None:
        self.examples, self.max_tokens, self.environment = examples, max_tokens, environment

    @classmethod
    def of(
        cls, data: Sequence[dict[str, Any]], count: int, max_tokens: int, environment: Environment | None = None
    ) -> Accuracy | None:
        families = [s["path"].removeprefix(BUILTIN) for s in data if s["path"].startswith(BUILTIN)]
        if not families or not count:
            return None
        opened = [TaskExamples(family, "test") for family in families]
        return cls([opened[n % len(opened)][n // len(opened)] for n in range(count)], max_tokens, environment)

    def __call__(self, model: Model) -> dict[str, float]:
        engine = Engine(model, seed=0)
        wishes = {"max_tokens": self.max_tokens, "temperature": 0.0}
        rewards, seeds = [("task", 1.0, TaskScore())], [0] * len(self.examples)
        if self.environment is not None:
            rolled = play(engine, self.examples, players(self.environment, 1, wishes), rewards, seeds)
        else:
            rolled = roll(engine, self.examples, 1, wishes, rewards, seeds)
        return {"accuracy": sum(group[0].judged.total for group in rolled.groups) / len(self.examples)}
