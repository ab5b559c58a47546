"""Which rows of a flat ragged batch each rank has, and how rows come together and apart again, with gradients.

A rank's rows stand in the order they have in the batch, so what a rank has of a sequence is one run of its rows. Shares
may be uneven or empty. `Traffic` counts what leaves a rank, forward and backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

# contiguous: equal runs of the batch. zigzag: of 2N equal pieces of each sequence, rank r has piece r and piece
# 2N - 1 - r, so that under a causal mask every rank has as many query-key pairs.
SplitKind = Literal["contiguous", "zigzag"]


class Run(NamedTuple):
    """Rows of a rank from `row` on that follow one another in a sequence too, there from `position` on."""

    sequence: int
    row: int
    position: int
    length: int


@dataclass(frozen=True, eq=False)
class RowSplit:
    """`parts[r]` are the places in the batch of rank r's rows, `runs[r]` what they are of which sequences."""

    tokens: int
    parts: tuple[Tensor, ...]
    runs: tuple[tuple[Run, ...], ...]
    in_order: bool  # whether all ranks' rows, one rank after the other, are the batch as it is
    order_T: Tensor  # the places of all ranks' rows, one rank after the other
    place_T: Tensor  # of each row of the batch, where it is among those
    kept: dict[Any, Any] = field(default_factory=dict)  # what others found out about it, for as long as it lives

    @classmethod
    def of(
        cls,
        lengths: Sequence[int],
        ranks: int,
        kind: SplitKind = "contiguous",
        device: torch.device | str = "cpu",
    ) -> RowSplit:
        """Of a batch of sequences of these lengths. What was made is kept: every layer of a model asks."""
        return _split(tuple(lengths), ranks, kind, torch.device(device))

    @property
    def counts(self) -> list[int]:
        return [len(part) for part in self.parts]

    def ordered(self, rows_T: Tensor) -> Tensor:
        """All ranks' rows, one rank after the other, as the batch has them."""
        return rows_T if self.in_order else rows_T.index_select(0, self.place_T)

    def by_rank(self, rows_T: Tensor) -> Tensor:
        """The other way: the batch's rows, one rank's after the other's."""
        return rows_T if self.in_order else rows_T.index_select(0, self.order_T)


@lru_cache(maxsize=16)
@torch.inference_mode(False)  # what is kept must serve training, too
def _split(lengths: tuple[int, ...], ranks: int, kind: SplitKind, device: torch.device) -> RowSplit:
    tokens = sum(lengths)
    rank_T = _contiguous(tokens, ranks) if kind == "contiguous" else _zigzag(lengths, ranks)
    parts = [(rank_T == rank).nonzero().squeeze(1) for rank in range(ranks)]
    order_T = torch.cat(parts)
    runs: list[list[Run]] = [[] for _ in range(ranks)]
    rows = [0] * ranks
    for sequence, rank_S in enumerate(rank_T.split(list(lengths))):
        position = 0
        for rank, length in zip(
            *(found.tolist() for found in rank_S.unique_consecutive(return_counts=True)), strict=True
        ):
            runs[rank].append(Run(sequence, rows[rank], position, length))
            rows[rank], position = rows[rank] + length, position + length
    return RowSplit(
        tokens,
        tuple(part.to(device) for part in parts),
        tuple(map(tuple, runs)),
        bool((order_T == torch.arange(tokens)).all()),
        order_T.to(device),
        order_T.argsort().to(device),
    )


def _contiguous(tokens: int, ranks: int) -> Tensor:
    """Equal runs, some a row longer where they do not come out even: those that tensor-parallel ranks divide rows by,
    too (tensor/exchange.py)."""
    edges_R = torch.arange(ranks + 1) * tokens // ranks
    return torch.arange(ranks).repeat_interleave(edges_R.diff())


def _zigzag(lengths: tuple[int, ...], ranks: int) -> Tensor:
    """Pieces that are a row longer than others are dealt out in turn, or the first ranks would have them all."""
    pieces = torch.cat([torch.arange(ranks), torch.arange(ranks).flip(0)])
    found, turn = [torch.empty(0, dtype=torch.int64)], 0
    for length in lengths:
        each, more = divmod(length, 2 * ranks)
        sizes = torch.full((2 * ranks,), each)
        sizes[(torch.arange(more) + turn) % (2 * ranks)] += 1
        turn += more
        found.append(pieces.repeat_interleave(sizes))
    return torch.cat(found)


@dataclass
class Traffic:
    """Bytes that left this rank for others, in forward and in backward passes."""

    forward: int = 0
    backward: int = 0

    def count(self, size: int, *, backward: bool = False) -> None:
        if backward:
            self.backward += size
        else:
            self.forward += size


class RowGroup:
    """The ranks that divide rows among them, and what this one has sent."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group: Any = group if group is not None else dist.group.WORLD
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.traffic = Traffic()

    def exchange(self, rows: Tensor, leaving: list[int], arriving: list[int], *, backward: bool = False) -> Tensor:
        size = rows[:1].numel() * rows.element_size()
        self.traffic.count(size * (sum(leaving) - leaving[self.rank]), backward=backward)
        found = rows.new_empty(sum(arriving), *rows.shape[1:])
        dist.all_to_all_single(found, rows.contiguous(), arriving, leaving, group=self.group)
        return found

    def gather(self, rows_T: Tensor, counts: list[int], *, backward: bool = False) -> Tensor:
        """All ranks' rows, one rank after the other. Shares are padded to the largest, which is a row or two more than
        the others: one collective for all."""
        mine = rows_T.new_zeros(max(counts), *rows_T.shape[1:])
        mine[: len(rows_T)] = rows_T
        found = [torch.empty_like(mine) for _ in counts]
        self.traffic.count((self.size - 1) * mine.numel() * mine.element_size(), backward=backward)
        dist.all_gather(found, mine, group=self.group)
        return torch.cat([part[:count] for part, count in zip(found, counts, strict=True)])

    def reduce(self, rows_T: Tensor, counts: list[int], *, backward: bool = False) -> Tensor:
        """What every rank found for this rank's rows, added up in the order of ranks: the same bits every time."""
        here = counts[self.rank]
        found = self.exchange(rows_T, counts, [here] * self.size, backward=backward)
        return found.view(self.size, here, *rows_T.shape[1:]).sum(0)


def all_to_all(rows: Tensor, leaving: list[int], arriving: list[int], ranks: RowGroup) -> Tensor:
    """As many rows (along the first dimension) to every rank as `leaving` says; gradients travel back."""
    return cast(Tensor, _AllToAll.apply(rows, leaving, arriving, ranks))


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, leaving: list[int], arriving: list[int], ranks: RowGroup) -> Tensor:
        ctx.way, ctx.ranks = (arriving, leaving), ranks
        return ranks.exchange(rows, leaving, arriving)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.ranks.exchange(grads[0], *ctx.way, backward=True), None, None, None


def gather_rows(rows_T: Tensor, split: RowSplit, ranks: RowGroup, *, gradient: Literal["sum", "own"] = "sum") -> Tensor:
    """Every rank's rows as the whole batch has them, on every rank.

    Where every rank goes on to compute a part of the loss, a row's gradient is the `sum` of what the ranks found. Where
    every rank computes the same whole loss (a balance loss that needs whole sequences), all found the same: its `own`
    is all of it, and nothing is sent.
    """
    return split.ordered(cast(Tensor, _Gather.apply(rows_T, split.counts, ranks, gradient == "sum")))


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_T: Tensor, counts: list[int], ranks: RowGroup, summed: bool) -> Tensor:
        ctx.back = counts, ranks, summed
        return ranks.gather(rows_T, counts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        counts, ranks, summed = ctx.back
        if summed:
            return ranks.reduce(grads[0], counts, backward=True), None, None, None
        return grads[0].split(counts)[ranks.rank].contiguous(), None, None, None
