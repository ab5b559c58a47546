"""Guess the tokens that come next, for the model to check in one forward. Wrong guesses cost time, never a token.

A drafter is one file. It may keep something for every request (what it has seen, a cache of its own) under the
request's number, and is told when a request ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from moesaic.serve.request import Request

if TYPE_CHECKING:
    from moesaic.serve.engine import Engine
    from moesaic.serve.passes import Pass


@dataclass
class Draft:
    """A tree of guesses after a request's last known token: node i holds `tokens[i]` and follows node `parents[i]`
    (-1: the last known token). Parents come before their children."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)

    @classmethod
    def line(cls, tokens: Sequence[int]) -> Draft:
        return cls(list(tokens), list(range(-1, len(tokens) - 1)))

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_line(self) -> bool:
        return all(parent == number - 1 for number, parent in enumerate(self.parents))

    def child(self, parent: int, token: int) -> int | None:
        """The node that holds a token and follows a node."""
        for number, (guess, before) in enumerate(zip(self.tokens, self.parents)):
            if before == parent and guess == token:
                return number
        return None

    def cut(self, size: int) -> Draft:
        return Draft(self.tokens[:size], self.parents[:size])


class Drafter:
    """What a method of drafting offers. `draft` is called before a pass, `observe` after it."""

    def start(self, engine: Engine) -> None:
        """Called once, before anything else."""

    def draft(self, requests: Sequence[Request], most: int) -> list[Draft]:
        """At most so many guesses for each of these requests, which all wait for their next token."""
        raise NotImplementedError

    def observe(self, done: Pass, hidden_TD: Tensor) -> None:
        """A pass has finished, its tokens are accepted."""

    def finished(self, request: Request) -> None:
        """A request will not go on: forget it."""
