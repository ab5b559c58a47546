"""Environments in which a model acts over several turns. RL trains in them, and the suite `agents` evaluates in them.
Each is one file, found by its name.

    environment: {name: tool_use, tools: [python], turns: 4}        # of a policy stage, on the prompts of its data
    environment: {name: sql}                                        # with tasks of its own (text_actions.py)
    moesaic evaluate DIR --suite agents environments=shell,sql

An environment is options; an episode of it is one attempt at one example. The episode says how the conversation begins,
and after each turn what the model is shown next. What it is shown is never learned from; what it said is. A message
may hold pictures, as the API has them ({type: image_url, ...}): a model behind a URL sees them, one here refuses them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from moesaic.serve.parsers import Message
from moesaic.worlds.example import Example
from moesaic.worlds.judges import Answer

Judge = Callable[[Answer], float]
Judges = Callable[[Mapping[str, Any]], Judge]  # of a reward as a recipe names it, {name: exact, ...}


@dataclass(frozen=True)
class Step:
    """What became of a turn. `score`, from 0 to 1, is of this step alone (process reward: `rewards: [process]`);
    `reward` is what the environment gives (`rewards: [environment]`)."""

    messages: Sequence[dict[str, Any]] = ()  # what the model is shown before its next turn
    done: bool = False
    score: float | None = None
    reward: float = 0.0
    invalid: Literal["format", "action"] | None = None  # why the turn changed nothing, where actions have a form


@dataclass
class Episode:
    """Belongs to one rollout. `step` may take its time: it does not run on the engine's thread."""

    messages: list[dict[str, Any]]  # how it begins
    tools: list[dict[str, Any]]  # as in the API

    def step(self, said: Message) -> Step:
        """`said` is the model's turn, taken apart: content, reasoning, calls."""
        raise NotImplementedError

    def close(self) -> None:
        """Called once, however it ended."""
        return None


@dataclass(frozen=True)
class Environment:
    turns: int = 4  # of the model, at most

    def check(self) -> None:
        """Whether what it needs is there, before any stage is run."""

    def judged_by(self, judges: Judges) -> None:
        """Called before anything else, by whoever knows rewards by their names; most have no use for them."""

    @property
    def own_tasks(self) -> bool:
        """Whether it makes its tasks itself, so that who trains in it names no data."""
        return False

    def example(self, number: int, seed: int | str = 0) -> Example:
        """Its own task of a number. Those of different seeds are different: numbers the suite's, texts for training."""
        raise NotImplementedError

    def begin(self, example: Example) -> Episode:
        raise NotImplementedError
