"""What rank 0 tells the others: one array of whole numbers, its length first, then a command and what belongs to it.

Before the command stand the changes of pages (copies, moves) and the adapters that are no longer used, in the order in
which they happened on rank 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

import torch

from moesaic.model.layout import Span
from moesaic.serve.core.forward_pass import Chunk
from moesaic.serve.group.links import Link

FIRST = 512  # numbers of the first message, which mostly is the only one


class Command(IntEnum):
    END = 0
    START = 1  # pages, page size, number of the cache's dtype
    STEP = 2
    HEAD = 3  # so many hidden states follow, whose logits are wanted
    ADAPTER = 4  # its number, then the bytes of its directory's name
    STATS = 5
    WEIGHTS = 6  # the bytes of a directory's name
    EXPERTS = 7  # slots that get other experts, by layer
    FETCH = 9  # pages of another engine: a message as `pages.pack` writes it
    PREDICT = 8  # a multi-token-prediction layer's number and its rows, whose hidden states follow
    REJOIN = 9  # an expert rank that was lost is there again: its number, and which of its lives it is in


class Copy(NamedTuple):
    """The first rows of a page to another."""

    dp: int
    source: int
    target: int
    rows: int


class Move(NamedTuple):
    """Single rows of the cache."""

    dp: int
    sources: tuple[int, ...]
    targets: tuple[int, ...]


class Forget(NamedTuple):
    adapter: int


class Write(NamedTuple):
    """One of the pages that came for a ticket, to a page of the cache."""

    dp: int
    ticket: int
    place: int
    page: int


class Drop(NamedTuple):
    """What else came for a ticket is not needed."""

    ticket: int


Change = Copy | Move | Forget | Write | Drop


@dataclass
class Piece:
    """A request's share of a step."""

    dp: int
    tokens: list[int]  # new ones, draft tokens last
    cached: int
    pages: list[int]
    adapter: int = -1
    first_wanted: int = -1  # from which row on logits are wanted; -1: of none
    hidden: bool = False  # whether rank 0 wants its hidden states
    parents: list[int] = field(default_factory=list)  # of draft tokens that are a tree

    @classmethod
    def of(cls, chunk: Chunk, adapter: int) -> Piece:
        request, draft = chunk.request, chunk.draft
        return cls(
            request.data_rank,
            chunk.new_tokens(),
            request.computed,
            list(request.pages),
            adapter,
            chunk.tokens - 1 if chunk.last else -1,
            request.embed or request.sampling.prompt_logprobs is not None,
            list(draft.parents) if draft is not None and not draft.is_line else [],
        )

    def numbers(self) -> list[int]:
        sizes = [len(self.tokens), len(self.pages), len(self.parents)]
        one = [self.dp, self.cached, self.adapter, self.first_wanted, int(self.hidden)]
        return [*sizes, *one, *self.tokens, *self.pages, *self.parents]

    @classmethod
    def read(cls, numbers: Reader) -> Piece:
        tokens, pages, parents = numbers.take(3)
        dp, cached, adapter, first_wanted, hidden = numbers.take(5)
        lists = numbers.take(tokens), numbers.take(pages), numbers.take(parents)
        return cls(dp, lists[0], cached, lists[1], adapter, first_wanted, bool(hidden), lists[2])

    @property
    def wanted(self) -> range:
        return range(self.first_wanted, len(self.tokens)) if self.first_wanted >= 0 else range(0)

    def positions(self) -> list[int]:
        places = list(range(self.cached, self.cached + len(self.tokens) - len(self.parents)))
        known = len(places)
        for parent in self.parents:
            places.append(places[known + parent] + 1)
        return places


@dataclass
class Predicted:
    """The rows of a multi-token-prediction layer: of each request its tokens, what is cached before them, its pages."""

    layer: int
    lengths: list[int]
    cached: list[int]
    pages: list[list[int]]
    positions: list[int]
    tokens: list[int]

    def numbers(self) -> list[int]:
        each = [
            number
            for length, cached, pages in zip(self.lengths, self.cached, self.pages, strict=True)
            for number in (length, cached, len(pages), *pages)
        ]
        return [self.layer, len(self.lengths), *each, *self.positions, *self.tokens]

    @classmethod
    def read(cls, numbers: Reader) -> Predicted:
        made = cls(numbers.one(), [], [], [], [], [])
        for _ in range(numbers.one()):
            length, cached, pages = numbers.take(3)
            made.lengths.append(length)
            made.cached.append(cached)
            made.pages.append(numbers.take(pages))
        made.positions, made.tokens = (numbers.take(sum(made.lengths)) for _ in range(2))
        return made


def spans_of(pieces: Sequence[Piece]) -> list[Span]:
    found, start = [], 0
    for number, piece in enumerate(pieces):
        found.append(Span(number, start, start + len(piece.tokens), piece.cached))
        start += len(piece.tokens)
    return found


class Reader:
    def __init__(self, numbers: list[int]) -> None:
        self.numbers, self.at = numbers, 0

    def take(self, count: int) -> list[int]:
        self.at += count
        return self.numbers[self.at - count : self.at]

    def one(self) -> int:
        return self.take(1)[0]

    def rest(self) -> list[int]:
        return self.take(len(self.numbers) - self.at)


class Told(NamedTuple):
    changes: list[Change]
    command: Command
    body: Reader


def send(
    link: Link, changes: Sequence[Change], command: Command, body: Sequence[int] = (), patience: float | None = None
) -> None:
    """Ranks wait for this as long as it takes; the first waits for them only so many seconds."""
    numbers = [0, len(changes), *(number for change in changes for number in _written(change)), command, *body]
    numbers[0] = len(numbers)
    array = torch.tensor(numbers + [0] * max(0, FIRST - len(numbers)))
    link.broadcast(array[:FIRST], "step", patience)
    if len(numbers) > FIRST:
        link.broadcast(array[FIRST:], "step", patience)


def receive(link: Link) -> Told:
    array = link.broadcast(torch.empty(FIRST, dtype=torch.int64), "step")
    length = int(array[0])
    if length > FIRST:
        array = torch.cat([array, link.broadcast(torch.empty(length - FIRST, dtype=torch.int64), "step")])
    reader = Reader(array[:length].tolist())
    reader.one()
    changes = list(_changes(reader, reader.one()))
    return Told(changes, Command(reader.one()), reader)


def _written(change: Change) -> list[int]:
    if isinstance(change, Copy):
        return [0, *change]
    if isinstance(change, Move):
        return [1, change.dp, len(change.sources), *change.sources, *change.targets]
    if isinstance(change, Write):
        return [3, *change]
    if isinstance(change, Drop):
        return [4, change.ticket]
    return [2, change.adapter]


def _changes(reader: Reader, count: int) -> Iterator[Change]:
    for _ in range(count):
        kind = reader.one()
        if kind == 0:
            yield Copy(*reader.take(4))
        elif kind == 1:
            dp, rows = reader.take(2)
            yield Move(dp, tuple(reader.take(rows)), tuple(reader.take(rows)))
        elif kind == 3:
            yield Write(*reader.take(4))
        elif kind == 4:
            yield Drop(reader.one())
        else:
            yield Forget(reader.one())


def write_text(text: str) -> list[int]:
    return list(text.encode())


def read_text(numbers: list[int]) -> str:
    return bytes(numbers).decode()
