"""Worlds with tasks of their own, in which a turn is one action in one line of text (AgentBench, Liu et al.).

A world makes its tasks from a seed, the same each time: a policy stage that names one needs no data. A task is played
in a `Simulation`, a small state machine: `open` says what is to be done, `act` carries out one action, and gives what
is seen then, or how well it went. A turn without an action, or with one that the world refuses, changes nothing and is
answered with what is wrong; so many of them in a row (`mistakes`) end the episode.
"""

from __future__ import annotations

import importlib
import random
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

from moesaic.methods import known
from moesaic.serve.parsers import Message
from moesaic.worlds.environments import Environment, Episode, Step
from moesaic.worlds.example import Example

MAX_CHARACTERS = 8_000  # of a turn, that are read
FORM = "Answer with one action, in one line: Action: ..."
FENCED = re.compile(r"```[^\n`]*\n(.*?)```", re.S)
MARKED = re.compile(r"^[ \t]*Action:(.*)$", re.M)


class Malformed(Exception):
    """A turn in which there is no action, or more than one."""


class Invalid(Exception):
    """An action that the world does not know, or does not allow as things stand."""


@dataclass(frozen=True)
class Finished:
    """The end, and how well it went, from 0 to 1."""

    score: float
    observation: str = ""


class Simulation(ABC):
    @abstractmethod
    def open(self) -> str:
        """What the model is told first: the world, its actions, and what is to be done."""

    @abstractmethod
    def act(self, action: str) -> str | Finished:
        """What is seen after an action of one line. Raises `Invalid`, and then nothing has changed."""

    def close(self) -> None:
        """Called once, however it ended."""
        return None


@dataclass
class Acting(Episode):
    """A simulation, acted in by what a model says."""

    simulation: Simulation
    mistakes: int  # in a row, at most
    wrong: int = 0  # in a row so far

    def step(self, said: Message) -> Step:
        try:
            seen = self.simulation.act(action_in(said.content))
        except (Malformed, Invalid) as error:
            self.wrong += 1
            invalid: Literal["format", "action"] = "format" if isinstance(error, Malformed) else "action"
            return Step(_shown(str(error)), done=self.wrong >= self.mistakes, invalid=invalid)
        self.wrong = 0
        if isinstance(seen, Finished):
            return Step(_shown(seen.observation), done=True, reward=seen.score)
        return Step(_shown(seen))

    def close(self) -> None:
        self.simulation.close()


def _shown(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@dataclass(frozen=True)
class World(Environment):
    turns: int = 10
    mistakes: int = 3  # in a row, that end an episode

    def __post_init__(self) -> None:
        if self.turns < 1 or self.mistakes < 1:
            raise ValueError("turns and mistakes are at least 1")

    def simulation(self, draw: random.Random, number: int) -> Simulation:
        """The task of a number: its kind by turns, everything else drawn."""
        raise NotImplementedError

    @property
    def own_tasks(self) -> bool:
        return True

    def example(self, number: int, seed: int | str = 0) -> Example:
        facts = {"world": [seed, number]}
        episode = self.begin(Example((), facts=facts))
        episode.close()
        return Example(tuple(episode.messages), facts=facts)

    def begin(self, example: Example) -> Episode:
        seed, number = example.facts["world"]
        name = type(self).__module__.rpartition(".")[2]
        simulation = self.simulation(random.Random(f"{name} {seed} {number}"), number)
        return Acting(_shown(simulation.open()), [], simulation, self.mistakes)


@dataclass(frozen=True)
class WorldExamples:
    """An environment's own tasks that are trained on, drawn apart from those that the suite `agents` asks."""

    world: Environment
    seed: int

    def __getitem__(self, index: int) -> Example:
        return self.world.example(index, f"train {self.seed}")


def known_worlds() -> list[str]:
    """The names of those environments that have tasks of their own."""
    found = []
    for name in known(Environment):
        members = vars(importlib.import_module(f"{Environment.__module__}.{name}")).values()
        if any(isinstance(member, type) and issubclass(member, World) and member is not World for member in members):
            found.append(name)
    return found


def action_in(text: str) -> str:
    """The action of a turn: the line of a fenced block, or what stands behind `Action:`; thoughts do not count."""
    if len(text) > MAX_CHARACTERS:
        raise Malformed(f"That was longer than {MAX_CHARACTERS} characters. {FORM}")
    text = text.rpartition("</think>")[2]
    lines = [line.strip() for block in FENCED.findall(text) for line in block.splitlines() if line.strip()]
    marked = [found.strip() for found in MARKED.findall(FENCED.sub("", text))]
    found = [line for line in (*(line.removeprefix("Action:").strip() for line in lines), *marked) if line]
    if not found:
        opened = " A block was opened with ``` and not closed." if text.count("```") % 2 else ""
        raise Malformed(f"There was no action in that.{opened} {FORM}")
    if len(found) > 1:
        raise Malformed(f"There were {len(found)} actions in that, and one can be carried out at a time. {FORM}")
    return found[0]


def same(said: str, truth: str) -> bool:
    """Whether an answer is the one that is looked for: as a number, or else as words."""
    said, truth = (text.strip().strip("'\"`").rstrip(".").strip() for text in (said, truth))
    try:
        return abs(float(said.replace(",", "")) - float(truth)) < 1e-6
    except ValueError:
        return said.casefold() == truth.casefold()
