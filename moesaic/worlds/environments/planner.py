"""Learn to plan for somebody else (EAGLET): the model writes a plan, an executor that does not learn follows it, and
the plan is worth how much more often the executor is right with it than without.

environment: {name: planner, executor: out/sft, attempts: 4, max_tokens: 64}
rewards: [{name: environment}]
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from moesaic.model.directory import load
from moesaic.model.formats.matching import match
from moesaic.model.formats.opening import open_checkpoint
from moesaic.serve.core.engine import Engine
from moesaic.serve.parsers import Message
from moesaic.worlds.completions import requests_for, seed_of
from moesaic.worlds.environments import Environment, Episode, Judge, Judges, Step
from moesaic.worlds.example import Example
from moesaic.worlds.judges import Answer
from moesaic.worlds.stage_outputs import is_stage_output, names_stage_output


@dataclass(frozen=True)
class Planner(Environment):
    executor: str = ""  # a model directory
    attempts: int = 4  # of the executor, with each plan
    max_tokens: int = 64  # of an attempt
    temperature: float = 0.7
    reward: dict[str, Any] = field(default_factory=lambda: {"name": "task"})  # what is right
    request: str = "Write a short plan for this task. Do not solve it.\n\n"
    hint: str = "\n\nFollow this plan:\n"
    _judges: list[Judges] = field(default_factory=list, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.executor or self.attempts < 1:
            raise ValueError("planner needs the executor's directory and at least one attempt")

    def check(self) -> None:
        if not is_stage_output(self.executor):
            match(open_checkpoint(self.executor))
        if not names_stage_output(self.reward):
            self.judge()

    def judged_by(self, judges: Judges) -> None:
        self._judges[:] = [judges]

    def begin(self, example: Example) -> Episode:
        *before, last = map(dict, example.messages)
        asked = {"role": "user", "content": self.request + str(last.get("content", ""))}
        return PlannerEpisode([*before, asked], [], self, self.follower, example)

    def judge(self) -> Judge:
        (judges,) = self._judges
        return judges(self.reward)

    @cached_property
    def follower(self) -> Executor:
        return Executor(self)


class Executor:
    """A model that stays as it is, and what it can do without help. One plan at a time: the engine belongs to one."""

    def __init__(self, options: Planner) -> None:
        self.options = options
        self.judge = options.judge()
        self._engine: Engine | None = None
        self._lock = threading.Lock()
        self._alone: dict[str, float] = {}

    def gain(self, example: Example, plan: str) -> float:
        """How much more often the task is done with a plan than without one, from -1 to 1."""
        with self._lock:
            if example.question not in self._alone:
                self._alone[example.question] = self._rate(example, example.messages)
            *before, last = map(dict, example.messages)
            told = {"role": "user", "content": f"{last.get('content', '')}{self.options.hint}{plan}"}
            return self._rate(example, (*before, told)) - self._alone[example.question]

    def _rate(self, example: Example, messages: Sequence[dict[str, Any]]) -> float:
        if self._engine is None:
            self._engine = Engine(load(self.options.executor, threads=torch.get_num_threads()), seed=0)
        engine, options = self._engine, self.options
        shown = Example(tuple(messages), example.answer, example.task, example.facts)
        sampling = {"max_tokens": options.max_tokens, "temperature": options.temperature}
        requests = requests_for(engine, shown, options.attempts, sampling, seed_of(0))
        known = example.truth, example.task, example.facts
        answers = [
            Answer(example.question, done.text, len(done.tokens), done.finish_reason, *known)
            for done in engine.complete(requests)
        ]
        return sum(float(self.judge(answer)) for answer in answers) / len(answers)


@dataclass
class PlannerEpisode(Episode):
    options: Planner
    follower: Executor
    example: Example

    def step(self, said: Message) -> Step:
        return Step(done=True, reward=self.follower.gain(self.example, said.content.strip()))
