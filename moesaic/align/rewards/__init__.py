"""Rewards: what a completion is worth. Each is one file, found by its name; a recipe adds several up with weights.

    rewards: [{name: task}, {name: overlong, limit: 200, weight: 0.5}]

A reward looks at one completion. It may fail (a judge that does not reply, code that hangs): that is recorded with the
completion and costs only it its part of the sum, never the run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import isfinite  # by its name: one of the rewards is called math
from pathlib import Path
from typing import Any, ClassVar

from moesaic.errors import UserError
from moesaic.methods import Method, build, named
from moesaic.strict import found
from moesaic.worlds.example import Example
from moesaic.worlds.judges import Answer


class Reward:
    """Most are between 0 and 1. Whoever waits for something outside the process sets `parallel` above 1."""

    parallel: ClassVar[int] = 1
    held_out: ClassVar[bool] = False  # whether it is measured on held-out tasks, too, beside the accuracy

    @property
    def aspect(self) -> str:
        """What it looks at, where one reward can look at several things."""
        return ""

    def __call__(self, answer: Answer) -> float:
        """What one completion is worth; each reward has this, or `each`."""
        (result,) = self.each([answer])
        if isinstance(result, Exception):
            raise result
        return result

    def each(self, answers: Sequence[Answer]) -> list[float | Exception]:
        """Of every answer, or why there is none. Whoever is quicker with many at once does it in its own way."""

        def attempt(answer: Answer) -> float | Exception:
            try:
                return float(self(answer))
            except Exception as error:  # whatever a judge or a piece of code may come up with
                return error

        if self.parallel > 1:
            with ThreadPoolExecutor(self.parallel) as pool:
                return list(pool.map(attempt, answers))
        return [attempt(answer) for answer in answers]

    def asks(self, answer: Answer) -> Mapping[str, int]:
        """What the policy itself is asked before its answer is judged, each with the most tokens of a reply. It replies
        greedily, in the engine it answered in; what it says is in `answer.replies`, by the question."""
        return {}

    def lacks(self, example: Example) -> str:
        """What an example does not have that answers to it are judged by; nothing where they can be."""
        return ""

    def show(self, answers: Sequence[Answer], out: Path) -> None:
        """Pictures of held-out answers in a run's directory, where there is something to see."""


def without_truth(example: Example) -> str:
    """What an example lacks where the right answer must be known."""
    return "" if example.truth is not None or example.facts.get("answers") else "a right answer"


@dataclass(frozen=True)
class Judged:
    """The weighted sum, each part by name (None where it failed), and why those failed."""

    total: float
    parts: dict[str, float | None]
    problems: tuple[str, ...] = ()


def judge(rewards: Sequence[tuple[str, float, Reward]], answers: Sequence[Answer]) -> list[Judged]:
    """All answers by all rewards, given as (name, weight, reward)."""
    parts: list[dict[str, float | None]] = [{} for _ in answers]
    problems: list[list[str]] = [[] for _ in answers]
    totals = [0.0 for _ in answers]

    for name, weight, reward in rewards:
        for number, result in enumerate(reward.each(answers)):
            if not isinstance(result, Exception) and not isfinite(result):
                result = ValueError(f"gave {result}")
            if isinstance(result, Exception):
                parts[number][name] = None
                problems[number].append(f"{name}: {' '.join(str(result).split())[:200] or type(result).__name__}")
            else:
                parts[number][name] = result
                totals[number] += weight * result
    return [Judged(*judged) for judged in zip(totals, parts, map(tuple, problems), strict=True)]


def weighted_rewards(entries: Sequence[Mapping[str, Any]]) -> list[tuple[str, float, Reward]]:
    """Name, weight and reward of each that a recipe names; no two have the same name."""
    rewards: list[tuple[str, float, Reward]] = []
    for method in named(entries):
        options = dict(method.options)
        weight = options.pop("weight", 1.0)
        if not isinstance(weight, int | float) or isinstance(weight, bool) or not isfinite(weight):
            raise UserError(
                "align.stages: rewards", f"the weight of {method.name} is {found(weight)}", "Write a number."
            )
        reward = build(Method(method.name, options), Reward, "align.stages: rewards")
        name = ".".join(filter(None, (method.name, reward.aspect)))
        alike = sum(other.partition("#")[0] == name for other, _, _ in rewards)
        rewards.append((f"{name}#{alike + 1}" if alike else name, float(weight), reward))
    return rewards


def reward_of(entry: Mapping[str, Any]) -> Reward:
    """One that an environment's options name."""
    (method,) = named((entry,))
    reward = build(method, Reward, "align.stages: environment: reward")
    if type(reward).asks is not Reward.asks:
        problem = f"{method.name} asks the policy, which an environment cannot"
        raise UserError("align.stages: environment: reward", problem, "Name it in the stage's rewards.")
    return reward
