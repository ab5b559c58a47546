"""Worlds in which a model is examined over several turns (AgentBench, Liu et al.). Each is one file, found by its name.

    moesaic evaluate DIR --suite agents environments=shell,sql

An environment makes episodes from a seed, the same each time. An episode is a small state machine: `open` says what is
to be done, `act` carries out one action, and gives what is seen then, or how well it went.
"""

from __future__ import annotations

import random
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass

LONGEST = 8_000  # characters of an answer that are read
FORM = "Answer with one action, in one line: Action: ..."
FENCED = re.compile(r"```[^\n`]*\n(.*?)```", re.S)
MARKED = re.compile(r"^[ \t]*Action:(.*)$", re.M)


class Malformed(Exception):
    """An answer in which there is no action, or more than one."""


class Invalid(Exception):
    """An action that the world does not know, or does not allow as things stand."""


@dataclass(frozen=True)
class Finished:
    """The end, and how well it went, from 0 to 1."""

    score: float
    observation: str = ""


class Episode(ABC):
    @abstractmethod
    def open(self) -> str:
        """What the model is told first: the world, its actions, and what is to be done."""

    @abstractmethod
    def act(self, action: str) -> str | Finished:
        """What is seen after an action of one line. Raises `Invalid`, and then nothing has changed."""

    def close(self) -> None:
        """Called once, however it ended."""
        return None


class Environment(ABC):
    turns: int = 10  # of the model, at most, where the suite names no other number

    @abstractmethod
    def episode(self, draw: random.Random, number: int) -> Episode:
        """The episode of a number: its kind of task by turns, everything else drawn."""


def action_in(text: str) -> str:
    """The action of an answer: the line of a fenced block, or what stands behind `Action:`; thoughts do not count."""
    if len(text) > LONGEST:
        raise Malformed(f"That was longer than {LONGEST} characters. {FORM}")
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
