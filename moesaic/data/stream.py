"""Batches of tokens in a fixed order, from any position, for any number of ranks.

    stream = TokenStream.open("out/data", recipe)           # rank=0, ranks=1
    batch = next(stream)                                    # endless, unless the mixture says that it ends
    stream = stream.from_position(batch.position_after)     # as if never interrupted
    stream = stream.from_position(good).skip(bad)           # as of `good`, but past the data up to `bad`

Which token comes when is decided by the plan (mixture.py) and does not depend on the batch size: a batch is the next
`batch_tokens` tokens of the plan. A position is the number of tokens before it, so a run may even resume with another
batch size or number of ranks and still train on every token once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from moesaic.data.curricula import Curriculum
from moesaic.data.divided import divided
from moesaic.data.mixture import Plan, make_plan
from moesaic.data.packing import Batch, pack
from moesaic.data.shards import Shards
from moesaic.errors import UserError
from moesaic.recipe import Recipe
from moesaic.recipe_sections import LengthWarmupSection

__all__ = ["Batch", "ClosableStream", "StatefulStream", "Stream", "TokenStream"]

Position = dict[str, Any]  # {"tokens": consumed so far, "step": batches so far, "data": ..., "order": ...}: plain JSON


class Stream(Protocol):
    """What a run trains on: endless batches, and the position to resume from after each."""

    @property
    def position(self) -> Position: ...

    def from_position(self, position: Mapping[str, Any] | None) -> Stream: ...

    def skip(self, past: int | Mapping[str, Any]) -> Stream: ...

    def __next__(self) -> Batch: ...


@runtime_checkable
class StatefulStream(Protocol):
    """A stream that trains something itself (a critic): tensors that are saved and restored with the run."""

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Group, such as critic -> name -> tensor."""

    def restore(self, group: Callable[[str], dict[str, Tensor]]) -> None:
        """`group` reads the tensors saved under a name; none, if there are none."""


@runtime_checkable
class ClosableStream(Protocol):
    """A stream with resources (other processes) to release when the run ends, however it ends."""

    def close(self) -> None: ...


class TokenStream(Iterator[Batch]):
    def __init__(
        self,
        data: Shards,
        plan: Plan,
        *,
        batch_tokens: int,
        sequence_length: int,
        warmup: LengthWarmupSection | None = None,
        rank: int = 0,
        ranks: int = 1,
        tokens: int = 0,
        step: int = 0,
    ) -> None:
        assert 0 <= rank < ranks
        self.data, self.plan = data, plan
        self.batch_tokens, self.sequence_length, self.warmup = batch_tokens, sequence_length, warmup
        self.rank, self.ranks = rank, ranks
        self.tokens, self.step = tokens, step

    @classmethod
    def open(
        cls, directory: str | Path, recipe: Recipe, *, rank: int = 0, ranks: int = 1, verify: bool = False
    ) -> TokenStream:
        """The batches of a recipe, from prepared data."""
        data, section = divided(Shards(directory, verify=verify), recipe.data)
        train = recipe.train
        curriculum = recipe.build("data.curriculum", Curriculum) if section.curriculum is not None else None
        length = section.sequence_length
        tokens = sum(_sizes(step, train.batch_tokens, length, section.length_warmup)[1] for step in range(train.steps))
        plan = make_plan(data, section, curriculum, tokens=tokens)
        return cls(
            data,
            plan,
            batch_tokens=train.batch_tokens,
            sequence_length=length,
            warmup=section.length_warmup,
            rank=rank,
            ranks=ranks,
        )

    @property
    def domains(self) -> list[str]:
        return self.data.domains

    @property
    def position(self) -> Position:
        order = self.plan.fingerprint
        return {"tokens": self.tokens, "step": self.step, "data": self.data.fingerprint, "order": order}

    def from_position(self, position: Mapping[str, Any] | None) -> TokenStream:
        """The same stream from the batch after a position on; None is the start."""
        if position is None:
            return self._at(0, 0)
        if position["data"] != self.data.fingerprint:
            raise UserError(
                self.data.directory,
                "is not the data that this run was started with",
                "Put that back, or start a new run in another directory.",
            )
        if position["order"] != self.plan.fingerprint:
            raise UserError(
                "data",
                "the recipe mixes or orders the data differently from when this run was started"
                " (sources, weights, phases, curriculum, sequence_length, seed; with phases or a curriculum, also"
                " train.steps and train.batch_tokens)",
                "Put that back, or start a new run in another directory.",
            )
        return self._at(int(position["tokens"]), int(position["step"]))

    def skip(self, past: int | Mapping[str, Any]) -> TokenStream:
        """The same stream so many tokens further on, or past the data up to a later position; still at this step."""
        tokens = self.tokens + past if isinstance(past, int) else max(self.tokens, int(past["tokens"]))
        return self._at(tokens, self.step)

    def batches(self, limit: int) -> int:
        """How many batches are left, up to `limit`."""
        tokens = self.tokens
        for number in range(limit if self.plan.tokens is not None else 0):
            tokens += self._size(self.step + number)[1]
            if tokens > (self.plan.tokens or 0):
                return number
        return limit

    @property
    def exhausted(self) -> bool:
        return self.batches(1) == 0

    def __next__(self) -> Batch:
        if self.exhausted:
            raise StopIteration
        sequence_length, size = self._size(self.step)
        stop = self.tokens + size
        spans = self.plan.spans(self.tokens, stop)
        self.tokens, self.step = stop, self.step + 1
        return pack(self.data, spans, sequence_length, self.position, self.rank, self.ranks)

    def _size(self, step: int) -> tuple[int, int]:
        return _sizes(step, self.batch_tokens, self.sequence_length, self.warmup)

    def _at(self, tokens: int, step: int) -> TokenStream:
        return type(self)(
            self.data,
            self.plan,
            batch_tokens=self.batch_tokens,
            sequence_length=self.sequence_length,
            warmup=self.warmup,
            rank=self.rank,
            ranks=self.ranks,
            tokens=tokens,
            step=step,
        )


def batch_share(step: int, recipe: Recipe) -> float:
    """Tokens of a step's batch, as a share of a full one."""
    size, section = recipe.train.batch_tokens, recipe.data
    return _sizes(step, size, section.sequence_length, section.length_warmup)[1] / size


def _sizes(step: int, batch_tokens: int, length: int, warmup: LengthWarmupSection | None) -> tuple[int, int]:
    """Sequence length and tokens of a step: sequence-length warm-up ("The Stability-Efficiency Dilemma")."""
    if warmup is None or step >= warmup.steps:
        return length, batch_tokens
    grown = warmup.start + (length - warmup.start) * step / warmup.steps
    sequence_length = min(length, max(8, int(grown) // 8 * 8))
    return sequence_length, batch_tokens if warmup.batch == "same" else max(
        sequence_length, batch_tokens * sequence_length // length
    )
