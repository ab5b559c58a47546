"""Which rows of a flat ragged batch each rank has, and how rows come together and apart again, with gradients.

A rank's rows stand in the order they have in the batch, so what a rank has of a sequence is one run of its rows. Shares
may be uneven or empty. `Traffic` counts what leaves a rank, forward and backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor

# contiguous: equal runs of the batch. zigzag: of 2N equal pieces of each sequence, rank r has piece r and piece
# 2N - 1 - r, so that under a causal mask every rank has as many query-key pairs.
SplitKind = Literal["contiguous", "zigzag"]


@dataclass(frozen=True)
class RowSplit:
    """`parts[r]` are the places in the batch of rank r's rows; `lengths[r][s]` how many of them are of sequence s."""

    tokens: int
    parts: tuple[Tensor, ...]
    lengths: tuple[tuple[int, ...], ...]
    in_order: bool  # whether all ranks' rows, one rank after the other, are the batch as it is
    order_T: Tensor  # the places of all ranks' rows, one rank after the other
    place_T: Tensor  # of each row of the batch, where it is among those

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


@lru_cache(maxsize=64)
@torch.inference_mode(False)  # what is kept must serve training, too
def _split(lengths: tuple[int, ...], ranks: int, kind: SplitKind, device: torch.device) -> RowSplit:
    tokens = sum(lengths)
    rank_T = _contiguous(tokens, ranks) if kind == "contiguous" else _zigzag(lengths, ranks)
    parts = [(rank_T == rank).nonzero().squeeze(1) for rank in range(ranks)]
    order_T = torch.cat(parts)
    sequences = rank_T.split(list(lengths))
    counts = tuple(tuple(int((part == rank).sum()) for part in sequences) for rank in range(ranks))
    return RowSplit(
        tokens,
        tuple(part.to(device) for part in parts),
        counts,
        bool((order_T == torch.arange(tokens)).all()),
        order_T.to(device),
        order_T.argsort().to(device),
    )


def _contiguous(tokens: int, ranks: int) -> Tensor:
    """Equal runs, the first ones a row longer where they do not come out even."""
    each, more = divmod(tokens, ranks)
    return torch.arange(ranks).repeat_interleave(torch.tensor([each + (rank < more) for rank in range(ranks)]))


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


def all_to_all(
    rows: Tensor, leaving: list[int], arriving: list[int], group: dist.ProcessGroup, traffic: Traffic
) -> Tensor:
    """As many rows (along the first dimension) to every rank as `leaving` says; gradients travel back."""
    return cast(Tensor, _AllToAll.apply(rows, leaving, arriving, group, traffic))


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, leaving: list[int], arriving: list[int], group: dist.ProcessGroup, traffic: Traffic
    ) -> Tensor:
        ctx.back = arriving, leaving, group, traffic
        return exchanged(rows, leaving, arriving, group, traffic)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return exchanged(grads[0], *ctx.back, backward=True), None, None, None, None


def exchanged(
    rows: Tensor,
    leaving: list[int],
    arriving: list[int],
    group: dist.ProcessGroup,
    traffic: Traffic,
    *,
    backward: bool = False,
) -> Tensor:
    size = rows[:1].numel() * rows.element_size() if len(rows) else 0
    traffic.count(size * (sum(leaving) - leaving[dist.get_rank(group)]), backward=backward)
    found = rows.new_empty(sum(arriving), *rows.shape[1:])
    dist.all_to_all_single(found, rows.contiguous(), arriving, leaving, group=group)
    return found


def gather_rows(
    rows_T: Tensor,
    split: RowSplit,
    group: dist.ProcessGroup,
    traffic: Traffic | None = None,
    *,
    gradient: Literal["sum", "own"] = "sum",
) -> Tensor:
    """Every rank's rows as the whole batch has them, on every rank.

    Where every rank goes on to compute a part of the loss, a row's gradient is the `sum` of what the ranks found. Where
    every rank computes the same whole loss (a balance loss that needs whole sequences), all found the same: its `own`
    is all of it, and nothing is sent.
    """
    gathered = cast(Tensor, _Gather.apply(rows_T, split, group, traffic or Traffic(), gradient == "sum"))
    return split.ordered(gathered)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows_T: Tensor, split: RowSplit, group: dist.ProcessGroup, traffic: Traffic, summed: bool
    ) -> Tensor:
        ctx.back = split, group, traffic, summed
        return gathered_by_rank(rows_T, split, group, traffic)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        split, group, traffic, summed = ctx.back
        if summed:
            d_rows_T = summed_by_rank(grads[0], split, group, traffic, backward=True)
        else:
            d_rows_T = grads[0].split(split.counts)[dist.get_rank(group)].contiguous()
        return d_rows_T, None, None, None, None


def gathered_by_rank(
    rows_T: Tensor, split: RowSplit, group: dist.ProcessGroup, traffic: Traffic, *, backward: bool = False
) -> Tensor:
    """Shares are padded to the largest, which is a row or a few more than the others: one collective for all."""
    counts, ranks = split.counts, len(split.parts)
    widest = max(counts)
    mine = rows_T.new_zeros(widest, *rows_T.shape[1:])
    mine[: len(rows_T)] = rows_T
    found = [torch.empty_like(mine) for _ in range(ranks)]
    traffic.count((ranks - 1) * mine.numel() * mine.element_size(), backward=backward)
    dist.all_gather(found, mine, group=group)
    return torch.cat([part[:count] for part, count in zip(found, counts, strict=True)])


def summed_by_rank(
    rows_T: Tensor, split: RowSplit, group: dist.ProcessGroup, traffic: Traffic, *, backward: bool = False
) -> Tensor:
    """What every rank found for this rank's rows, added up in the order of ranks: the same bits every time."""
    rank, ranks = dist.get_rank(group), len(split.parts)
    count = split.counts[rank]
    found = exchanged(rows_T, split.counts, [count] * ranks, group, traffic, backward=backward)
    return found.view(ranks, count, *rows_T.shape[1:]).sum(0)
