"""Sequence packing: pieces of documents, end to end, as a batch without padding; and its division by whole pieces.

Division is the same everywhere: the longest piece first, each to whoever has the fewest tokens (the lowest number among
equals); the pieces of one share then stand in the order they have in the whole batch. So the shares of any number of
ranks, put together, are the pieces of the one-rank batch.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moesaic.data.given_rows import GIVEN
from moesaic.data.ordering import TokenSpans
from moesaic.data.shards import Shards

IGNORED = -100


@dataclass
class Batch:
    """Pieces of documents; a token attends within its piece only.

    `count` is the number of targets in the whole batch, over all ranks and parts: the sum of the shares' losses divided
    by it is the loss of the batch.
    """

    tokens_T: Tensor
    targets_T: Tensor  # the next token of the same piece, -100 at its end
    lengths: list[int]
    domains: list[int]  # of each piece; names are in the stream's `domains`
    count: int
    position_after: dict[str, Any] = field(default_factory=dict)
    columns: dict[str, Tensor] = field(default_factory=dict)  # further values per token, for objectives that need them
    notes: dict[str, float] = field(default_factory=dict)  # metrics of the batch, for metrics.jsonl
    samples: list[str] = field(default_factory=list)  # a few samples as text, for the log
    warnings: list[str] = field(default_factory=list)  # what went wrong while it was made, logged at once
    frozen: bool = False  # only evaluated: the model is not updated
    everywhere: list[int] = field(default_factory=list)  # lengths of all ranks' pieces; none: these are all

    @property
    def all_lengths(self) -> list[int]:
        return self.everywhere or self.lengths

    @property
    def all_tokens(self) -> int:
        return sum(self.all_lengths)

    def parts(self, number: int, device: torch.device | str | None = None) -> list[Batch]:
        """Divided into at most `number` batches of about equal size, each on `device`."""
        shares = [list(range(len(self.lengths)))] if number == 1 else divide(self.lengths, number)
        return [self._only(share, device) for share in shares if share]

    def share(self, rank: int, ranks: int) -> Batch:
        """One rank's pieces of it."""
        made = self._only(divide(self.lengths, ranks)[rank], None)
        made.everywhere = self.all_lengths
        made.samples, made.warnings, made.frozen = self.samples, self.warnings, self.frozen
        return made

    def to(self, device: torch.device | str) -> Batch:
        return self._only(list(range(len(self.lengths))), device)

    def _only(self, pieces: list[int], device: torch.device | str | None) -> Batch:
        tokens_T, targets_T, columns = self.tokens_T, self.targets_T, self.columns
        if len(pieces) < len(self.lengths):
            of_piece = np.zeros(len(self.lengths), bool)
            of_piece[pieces] = True
            mask_T = torch.from_numpy(np.repeat(of_piece, self.lengths))
            tokens_T, targets_T = tokens_T[mask_T], targets_T[mask_T]
            columns = {name: column_T[mask_T] for name, column_T in columns.items()}
        if device is not None:
            tokens_T, targets_T = tokens_T.to(device, non_blocking=True), targets_T.to(device, non_blocking=True)
            columns = {name: column_T.to(device, non_blocking=True) for name, column_T in columns.items()}
        lengths, domains = [self.lengths[n] for n in pieces], [self.domains[n] for n in pieces]
        return Batch(tokens_T, targets_T, lengths, domains, self.count, self.position_after, columns, self.notes)


@dataclass
class GroupedBatch(Batch):
    """The first `groups[0]` sequences belong together, then the next `groups[1]`, ... Ranks and micro-batches get as
    many groups each, as far as that goes: none is left without, which the others would wait for."""

    groups: list[int] = field(default_factory=list)

    def parts(self, number: int, device: torch.device | str | None = None) -> list[Batch]:
        if number == 1:
            return super().parts(1, device)
        return [self._only(self._sequences(share), device) for share in self._divided(number) if share]

    def share(self, rank: int, ranks: int) -> Batch:
        groups = self._divided(ranks)[rank]
        mine = self._only(self._sequences(groups), None)
        given = mine.tokens_T, mine.targets_T, mine.lengths, mine.domains, self.count, self.position_after, mine.columns
        said = self.notes, self.samples, self.warnings, self.frozen
        return GroupedBatch(*given, *said, everywhere=self.all_lengths, groups=[self.groups[n] for n in groups])

    def _divided(self, number: int) -> list[list[int]]:
        """Which groups go to which share."""
        ends = list(accumulate(self.groups))
        tokens = [sum(self.lengths[end - size : end]) for end, size in zip(ends, self.groups, strict=True)]
        return divide(tokens, number, most=-(-len(tokens) // number))

    def _sequences(self, groups: Sequence[int]) -> list[int]:
        starts = [0, *accumulate(self.groups)]
        return [n for group in groups for n in range(starts[group], starts[group + 1])]


def divide(lengths: Sequence[int], shares: int, most: int | None = None) -> list[list[int]]:
    """Which pieces go to which share; `most` is how many pieces one may have."""
    loads = [(0, share) for share in range(shares)]
    found: list[list[int]] = [[] for _ in range(shares)]
    for piece in sorted(range(len(lengths)), key=lambda piece: -lengths[piece]):
        load, share = heapq.heappop(loads)
        found[share].append(piece)
        if most is None or len(found[share]) < most:
            heapq.heappush(loads, (load + lengths[piece], share))
    return [sorted(pieces) for pieces in found]


def pack(
    data: Shards,
    spans: Sequence[TokenSpans],
    max_length: int,
    position_after: dict[str, Any],
    rank: int = 0,
    ranks: int = 1,
) -> Batch:
    """One rank's share of the batch that consists of `spans`, in pieces of at most `max_length` tokens."""
    starts, lengths, domains = _cut(spans, max_length)
    count, everywhere = int(lengths.sum()) - len(lengths), lengths.tolist()
    count -= data.rows.targets_lost(starts, lengths) if data.rows is not None else 0
    if ranks > 1:
        mine = divide(lengths.tolist(), ranks)[rank]
        starts, lengths, domains = starts[mine], lengths[mine], domains[mine]
    tokens = data.gather(starts, lengths)
    targets = np.empty_like(tokens)
    targets[:-1] = tokens[1:]
    targets[np.cumsum(lengths) - 1] = IGNORED
    columns = data.rows.columns(starts, lengths) if data.rows is not None else {}
    if columns:
        targets[:-1][columns[GIVEN].numpy()[1:]] = IGNORED
    return Batch(
        torch.from_numpy(tokens),
        torch.from_numpy(targets),
        lengths.tolist(),
        domains.tolist(),
        count,
        position_after,
        columns,
        everywhere=everywhere,
    )


def _cut(spans: Sequence[TokenSpans], max_length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    starts = np.concatenate([span.starts for span in spans])
    lengths = np.concatenate([span.lengths for span in spans])
    domains = np.concatenate([span.domains for span in spans])
    pieces = -(-lengths // max_length)
    if pieces.max(initial=0) > 1:
        number = np.arange(int(pieces.sum())) - np.repeat(np.cumsum(pieces) - pieces, pieces)  # within its stretch
        starts = np.repeat(starts, pieces) + number * max_length
        lengths = np.minimum(np.repeat(lengths, pieces) - number * max_length, max_length)
        domains = np.repeat(domains, pieces)
    return starts, lengths, domains
