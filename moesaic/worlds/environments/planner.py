"""Learn to plan for somebody else (EAGLET, Si et al.): the model writes a plan, an executor that does not learn follows
it, and the plan is worth how much better the executor does with it than without (executor capability gain).

environment: {name: planner, executor: out/sft, world: {name: house, size: full}}      # it plays whole episodes
environment: {name: planner, executor: [out/sft, out/early], by: min, world: cards}    # a plan on which all agree
environment: {name: planner, executor: out/sft, attempts: 4, max_tokens: 64}           # it answers the data's prompts
rewards: [{name: environment}]

With several executors of one family a plan is worth the mean of what each gains, or, `by: min`, the least of it: above
0 then is a plan that helps them all. Homologous consensus filtering, the cold start, is a `trajectories` stage (the
model's own plans) or a `demonstrations` stage (a teacher's) in this environment with `by: min`: they learn from the
plans that are worth at least `right`. With `decay` below 1 a reward counts less by each turn that it took.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import torch

from moesaic.methods import build, named
from moesaic.model.directory import load
from moesaic.model.formats.matching import match
from moesaic.model.formats.opening import open_checkpoint
from moesaic.serve.core.engine import Engine
from moesaic.serve.parsers import Message
from moesaic.worlds.completions import requests_for, seed_of
from moesaic.worlds.environments import Environment, Episode, Judge, Judges, Step
from moesaic.worlds.example import Example
from moesaic.worlds.judges import Answer
from moesaic.worlds.playing import EnginePlayer, play
from moesaic.worlds.stage_outputs import is_stage_output, names_stage_output

REQUEST = "Write a short plan for this task. Do not solve it.\n\n"
HINT = "\n\nFollow this plan:\n"


@dataclass(frozen=True)
class Planner(Environment):
    turns: int = 1  # a plan is one turn; those of the executor are the world's
    executor: str | tuple[str, ...] = ""  # a model directory, or several
    by: Literal["mean", "min"] = "mean"  # of what several executors gain
    world: dict[str, Any] | str | None = None  # what is planned for; else the prompts of the stage's data
    attempts: int = 4  # of each executor, with each plan
    max_tokens: int = 64  # of an attempt, or of a turn of it
    temperature: float = 0.7
    decay: float = 1.0  # of a reward, by each turn that an episode took
    reward: dict[str, Any] = field(default_factory=lambda: {"name": "task"})  # what is right, where there is no world
    request: str = REQUEST
    hint: str = HINT
    _judges: list[Judges] = field(default_factory=list, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.executor or not all(self.executors) or self.attempts < 1:
            raise ValueError("planner needs the executor's directory and at least one attempt")
        if not 0 < self.decay <= 1:
            raise ValueError("decay is above 0, and at most 1")
        if self.opened is not None and not self.opened.own_tasks:
            raise ValueError("world is one that has tasks of its own")

    @property
    def executors(self) -> tuple[str, ...]:
        return (self.executor,) if isinstance(self.executor, str) else tuple(self.executor)

    @cached_property
    def opened(self) -> Environment | None:
        if self.world is None:
            return None
        (method,) = named((self.world,))
        return build(method, Environment, "environment: planner")

    def check(self) -> None:
        for executor in self.executors:
            if not is_stage_output(executor):
                match(open_checkpoint(executor))
        if self.opened is not None:
            self.opened.check()
        elif not names_stage_output(self.reward):
            self.judge()

    def judged_by(self, judges: Judges) -> None:
        self._judges[:] = [judges]

    @property
    def own_tasks(self) -> bool:
        return self.opened is not None

    def example(self, number: int, seed: int | str = 0) -> Example:
        """The world's, as it is put to a planner."""
        assert self.opened is not None
        task = self.opened.example(number, seed)
        return replace(task, messages=tuple(self._asked(task)))

    def begin(self, example: Example) -> Episode:
        task = example if self.opened is None else _opening(self.opened, example)
        return PlannerEpisode(self._asked(task), [], self, task)

    def _asked(self, task: Example) -> list[dict[str, Any]]:
        return told(task.messages, before=self.request)

    def judge(self) -> Judge:
        (judges,) = self._judges
        return judges(self.reward)

    @cached_property
    def followers(self) -> list[Executor]:
        return [Executor(self, directory) for directory in self.executors]

    def gain(self, task: Example, plan: str) -> float:
        gains = [follower.gain(task, plan) for follower in self.followers]
        return min(gains) if self.by == "min" else sum(gains) / len(gains)


def told(messages: Sequence[Mapping[str, Any]], before: str = "", after: str = "") -> list[dict[str, Any]]:
    """A task with more in its last message: what is asked of a planner, or a plan."""
    *others, last = map(dict, messages)
    return [*others, last | {"role": "user", "content": f"{before}{last.get('content', '')}{after}"}]


def _opening(world: Environment, example: Example) -> Example:
    """A world's task with what is said at its beginning, which facts stand for."""
    episode = world.begin(example)
    episode.close()
    return replace(example, messages=tuple(episode.messages))


class Executor:
    """A model that stays as it is, and what it can do without help. One plan at a time: the engine belongs to one."""

    def __init__(self, options: Planner, directory: str) -> None:
        self.options, self.directory = options, directory
        self.judge = options.judge() if options.opened is None else None
        self._lock = threading.Lock()
        self._rated: dict[tuple[str, str], float] = {}

    def gain(self, task: Example, plan: str) -> float:
        """How much better it does with a plan than without one, from -1 to 1 where rewards are from 0 to 1."""
        with self._lock:
            return self._rating(task, f"{self.options.hint}{plan}") - self._rating(task, "")

    def _rating(self, task: Example, plan: str) -> float:
        """Played once: attempts draw from seeds of their own, so that the same plan for the same task ends the same."""
        if (key := (task.question, plan)) not in self._rated:
            self._rated[key] = self.rate(task, plan)
        return self._rated[key]

    @cached_property
    def engine(self) -> Engine:
        return Engine(load(self.directory, threads=torch.get_num_threads()), seed=0)

    def rate(self, task: Example, plan: str) -> float:
        """How well it does on the mean of its attempts, with this at the end of the task."""
        options = self.options
        sampling = {"max_tokens": options.max_tokens, "temperature": options.temperature}
        if options.opened is None:
            return self._answered(task, plan, sampling)
        tasks, texts = [task] * options.attempts, [plan] * options.attempts
        played = play(EnginePlayer(self.engine, sampling), options.opened, tasks, texts)
        return sum(one.reward * options.decay**one.turns for one in played) / len(played)

    def _answered(self, task: Example, plan: str, sampling: dict[str, Any]) -> float:
        shown = replace(task, messages=tuple(told(task.messages, after=plan)))
        requests = requests_for(self.engine, shown, self.options.attempts, sampling, seed_of(0))
        known = task.truth, task.task, task.facts
        answers = [
            Answer(task.question, done.text, len(done.tokens), done.finish_reason, *known)
            for done in self.engine.complete(requests)
        ]
        assert self.judge is not None
        return sum(float(self.judge(answer)) for answer in answers) / len(answers)


@dataclass
class PlannerEpisode(Episode):
    options: Planner
    task: Example

    def step(self, said: Message) -> Step:
        return Step(done=True, reward=self.options.gain(self.task, said.content.strip()))
