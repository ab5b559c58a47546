"""Guess the tokens that come next, for the model to check in one forward. Wrong guesses cost time, never a token.

A drafter is one file. It may keep something for every request (what it has seen, a cache of its own) under the
request's number, and is told when a request ends. Whether its guesses pay is not its business: the engine puts every
drafter behind the router, which measures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from moesaic.serve.core.request import Request

if TYPE_CHECKING:
    from moesaic.serve.core.engine import Engine
    from moesaic.serve.core.forward_pass import Forward


@dataclass
class Draft:
    """A tree of guesses after a request's last known token: node i holds `tokens[i]` and follows node `parents[i]`
    (-1: the last known token). Parents come before their children.

    `odds[i]` is how likely its drafter holds node i to be right if its parent is. Nothing but time depends on it.
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    odds: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.odds = self.odds or [0.5] * len(self.tokens)
        assert len(self.tokens) == len(self.parents) == len(self.odds)

    @classmethod
    def line(cls, tokens: Sequence[int], odds: Sequence[float] = ()) -> Draft:
        return cls(list(tokens), list(range(-1, len(tokens) - 1)), list(odds))

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

    def depths(self) -> list[int]:
        """How many guesses stand before each."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
        return depths

    def cut(self, size: int) -> Draft:
        return Draft(self.tokens[:size], self.parents[:size], self.odds[:size])

    def keep(self, nodes: Sequence[int]) -> Draft:
        """Some of the nodes, in their order, each with its parent."""
        new = {-1: -1} | {node: number for number, node in enumerate(nodes)}
        parents = [new[self.parents[node]] for node in nodes]
        return Draft([self.tokens[node] for node in nodes], parents, [self.odds[node] for node in nodes])

    def best_line(self) -> Draft:
        """The likeliest child of the likeliest child and so on, for models that cannot check trees."""
        line: list[int] = []
        while children := [n for n, parent in enumerate(self.parents) if parent == (line[-1] if line else -1)]:
            line.append(max(children, key=lambda node: self.odds[node]))
        return self.keep(line)


class Drafter:
    """What a method of drafting offers. `draft` is called before a pass, `observe` after it."""

    # Whether guesses cost next to nothing to make, so that it may be asked first and judged by what it says.
    instant: ClassVar[bool] = False
    length: int = 64  # guesses one after the other that it makes at most
    # Whether it must see every forward, because what it did not see it cannot make up for.
    watches: ClassVar[bool] = False

    def start(self, engine: Engine) -> None:
        """Called once, before anything else."""

    def draft(self, requests: Sequence[Request], most: int) -> list[Draft]:
        """At most so many guesses for each of these requests, which all wait for their next token."""
        raise NotImplementedError

    def observe(self, done: Forward, hidden_TD: Tensor) -> None:
        """A pass has finished, its tokens are accepted."""

    def rests(self, requests: int) -> bool:
        """Whether, with so many requests, it has nothing to say for a while. On a GPU, where a step without guesses can
        be queued before the one before it has ended, and one with guesses cannot, it is then not asked."""
        return False

    def rested(self, requests: int, seconds: float) -> None:
        """A step that was so queued took so long."""

    def finished(self, request: Request) -> None:
        """A request will not go on: forget it."""


def imagined(request: Request) -> Request:
    """A copy to add guesses to. It draws the same random numbers, so that a drafter samples as the model will."""
    copy = Request(request.prompt, request.sampling, seed=request.seed)
    copy.tokens = list(request.tokens)
    return copy
