"""Accuracy on held-out tasks, with greedy decoding: the curve that says whether alignment works."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moesaic.align.examples import BUILTIN, TaskExamples
from moesaic.align.rewards import Reward
from moesaic.align.rewards.environment import Given
from moesaic.align.rewards.task import TaskScore
from moesaic.align.rollouts.multi_turn import generate_multi_turn, multi_turn_rollouts
from moesaic.align.rollouts.rollout import generate
from moesaic.model.transformer import Model
from moesaic.serve.core.engine import Engine
from moesaic.worlds.environments import Environment
from moesaic.worlds.example import Example
from moesaic.worlds.judges import Answer


class Accuracy:
    """Only families of tasks and worlds have held-out tasks and know what is right; other sources have no say."""

    def __init__(
        self,
        examples: Sequence[Example],
        max_tokens: int,
        environment: Environment | None = None,
        also: Sequence[tuple[str, float, Reward]] = (),
    ) -> None:
        self.examples, self.max_tokens, self.environment = examples, max_tokens, environment
        of_world = environment is not None and environment.own_tasks
        self.rewards: list[tuple[str, float, Reward]] = (
            [("environment", 1.0, Given())] if of_world else [("task", 1.0, TaskScore())]
        )
        self.out: Path | None = None  # the run's directory, where it may show what it saw
        self.also = [(name, 0.0, reward) for name, _, reward in also if reward.held_out]

    @classmethod
    def of(
        cls,
        data: Sequence[dict[str, Any]],
        count: int,
        max_tokens: int,
        environment: Environment | None = None,
        also: Sequence[tuple[str, float, Reward]] = (),
    ) -> Accuracy | None:
        """`also`: a stage's rewards, some of which have something to say of held-out tasks, too."""
        if environment is not None and environment.own_tasks and count:
            return cls([environment.example(number) for number in range(count)], max_tokens, environment, also)
        families = [s["path"].removeprefix(BUILTIN) for s in data if s["path"].startswith(BUILTIN)]
        if not families or not count:
            return None
        opened = [TaskExamples(family, "test") for family in families]
        return cls([opened[n % len(opened)][n // len(opened)] for n in range(count)], max_tokens, environment, also)

    @staticmethod
    def names(
        data: Sequence[dict[str, Any]],
        count: int,
        environment: Environment | None = None,
        also: Sequence[tuple[str, float, Reward]] = (),
    ) -> tuple[str, ...]:
        """What `of` would measure."""
        own = environment is not None and environment.own_tasks
        if not count or not (own or any(source["path"].startswith(BUILTIN) for source in data)):
            return ()
        return ("accuracy", *(f"held_out/{name}" for name, _, reward in also if reward.held_out))

    @property
    def shows(self) -> bool:
        """Whether there are pictures, of which the first are to be of the model as it was at the start."""
        return any(type(reward).show is not Reward.show for _, _, reward in self.also)

    def __call__(self, model: Model) -> dict[str, float]:
        engine = Engine(model, seed=0)
        sampling = {"max_tokens": self.max_tokens, "temperature": 0.0}
        seeds = [0] * len(self.examples)
        rewards = [*self.rewards, *self.also]
        if self.environment is not None:
            start = multi_turn_rollouts(self.environment, 1, sampling)
            rollouts = generate_multi_turn(engine, self.examples, start, rewards, seeds)
        else:
            rollouts = generate(engine, self.examples, 1, sampling, rewards, seeds)
        if self.out is not None:
            said = [
                Answer(e.question, group[0].text, task=e.task, facts=e.facts)
                for e, group in zip(self.examples, rollouts.groups, strict=True)
            ]
            for reward in {type(reward): reward for _, _, reward in self.also}.values():
                reward.show(said, self.out)
        judged = [group[0].judged for group in rollouts.groups]
        count = len(self.examples)
        also = {f"held_out/{name}": sum(one.parts[name] or 0.0 for one in judged) / count for name, _, _ in self.also}
        return {"accuracy": sum(one.total for one in judged) / count} | also
