"""Speculative decoding: draft the next tokens, for the model to verify in one forward. A rejected draft token costs
time, and changes no output.

A drafter is one file. It may keep state for every request (tokens, a KV cache of its own) under the request's number,
and is notified when a request finishes. It need not know whether drafting pays: the engine puts every drafter behind
the router, which measures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from moesaic.serve.core.request import Request

if TYPE_CHECKING:
    from moesaic.model.transformer import Model
    from moesaic.serve.core.engine import Engine
    from moesaic.serve.core.forward_pass import Forward


@dataclass
class Draft:
    """A tree of draft tokens after a request's last token: node i holds `tokens[i]` and follows node `parents[i]`
    (-1: the last token). Parents come before their children.

    `confidence[i]` is the drafter's own probability that node i is accepted if its parent is. Nothing but time depends
    on it.
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    confidence: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.confidence = self.confidence or [0.5] * len(self.tokens)
        assert len(self.tokens) == len(self.parents) == len(self.confidence)

    @classmethod
    def line(cls, tokens: Sequence[int], confidence: Sequence[float] = ()) -> Draft:
        return cls(list(tokens), list(range(-1, len(tokens) - 1)), list(confidence))

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_line(self) -> bool:
        return all(parent == number - 1 for number, parent in enumerate(self.parents))

    def child(self, parent: int, token: int) -> int | None:
        """The node that holds a token and follows a node."""
        for number, (drafted, before) in enumerate(zip(self.tokens, self.parents)):
            if before == parent and drafted == token:
                return number
        return None

    def depths(self) -> list[int]:
        """How many draft tokens come before each."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
        return depths

    def cut(self, size: int) -> Draft:
        return Draft(self.tokens[:size], self.parents[:size], self.confidence[:size])

    def keep(self, nodes: Sequence[int]) -> Draft:
        """Some of the nodes, in their order, each with its parent."""
        new = {-1: -1} | {node: number for number, node in enumerate(nodes)}
        parents = [new[self.parents[node]] for node in nodes]
        return Draft([self.tokens[node] for node in nodes], parents, [self.confidence[node] for node in nodes])

    def best_line(self) -> Draft:
        """The likeliest child of the likeliest child and so on, for models that cannot verify trees."""
        line: list[int] = []
        while children := [n for n, parent in enumerate(self.parents) if parent == (line[-1] if line else -1)]:
            line.append(max(children, key=lambda node: self.confidence[node]))
        return self.keep(line)


class Drafter:
    """A method of drafting. `draft` is called before a forward, `observe` after it."""

    # Whether drafting costs next to nothing, so that it is always asked, and its drafts are judged by their confidence.
    instant: ClassVar[bool] = False
    length: int = 64  # max draft tokens one after the other
    # Whether it must observe every forward, because it cannot make up for one that it missed.
    needs_every_forward: ClassVar[bool] = False
    # Whether it drafts for shadows too, so that a larger draft model can verify its drafts before the model does.
    drafts_for_shadows: ClassVar[bool] = False

    @classmethod
    def offered(cls, model: Model, draft_models: Sequence[str]) -> Sequence[Drafter]:
        """The drafters that the router takes by itself for a model, given the directories of smaller ones, the smallest
        first; none where it can do nothing for that model."""
        return ()

    @property
    def label(self) -> str:
        """By which reports name it."""
        return type(self).__module__.rpartition(".")[2]

    def start(self, engine: Engine) -> None:
        """Called once, before anything else."""

    def stand_on(self, lower: Sequence[Drafter], always: bool = False) -> None:
        """Called once, after all have started: cheaper drafters, whose drafts it may verify instead of drafting token
        by token (a chain); with `always` wherever it can, whether it pays or not."""

    def draft(self, requests: Sequence[Request], limit: int) -> list[Draft]:
        """At most `limit` draft tokens for each of these requests, all of which are decoding."""
        raise NotImplementedError

    def observe(self, done: Forward, hidden_TD: Tensor) -> None:
        """A forward has finished, and its tokens are accepted."""

    def rests(self, requests: int) -> bool:
        """Whether it drafts nothing for a while, with so many requests. It is then not asked: on a GPU, only steps
        without draft tokens overlap."""
        return False

    def rested(self, requests: int, seconds: float) -> None:
        """A step that overlapped took so long."""

    def finished(self, request: Request) -> None:
        """A request has finished: free its state."""


@dataclass(eq=False)
class Shadow(Request):
    """A request's copy to append draft tokens to. Only its first `certain` tokens are the request's own; those behind
    them may be others the next time. It has the request's number, so that drafters find their state."""

    certain: int = 0


def shadow_of(request: Request) -> Shadow:
    """With the same seed, so that a drafter samples as the model will."""
    copy = Shadow(request.prompt, request.sampling, seed=request.seed, number=request.number)
    copy.tokens = list(request.tokens)
    copy.certain = certain_tokens(request)
    copy.breakers, copy.mu = request.breakers, request.mu
    return copy


def certain_tokens(request: Request) -> int:
    return request.certain if isinstance(request, Shadow) else len(request.tokens)
