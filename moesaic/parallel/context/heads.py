"""Ulysses (DeepSpeed): from some rows of all heads to all rows of some heads and back, by one all-to-all each.

Query heads are divided evenly, a head more for the first ranks where they do not come out even. A rank gets the key and
value heads its query heads read: one that several ranks read travels to each of them, and its gradients are added.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from moesaic.parallel.rows import RowGroup, RowSplit, all_to_all


@dataclass(frozen=True)
class HeadShare:
    """A rank's query heads `first` to `last`, and the key/value heads it gets for them."""

    first: int
    last: int
    kv: tuple[int, ...]
    kv_of: tuple[int, ...] | None  # of each query head its place in `kv`; None where each serves as many, in turn

    @property
    def heads(self) -> int:
        return self.last - self.first


@lru_cache(maxsize=64)
def divide_heads(heads: int, kv_heads: int, ranks: int) -> tuple[HeadShare, ...]:
    group = heads // kv_heads
    each, more = divmod(heads, ranks)
    edges = [rank * each + min(rank, more) for rank in range(ranks + 1)]
    shares = []
    for first, last in pairwise(edges):
        read = [head // group for head in range(first, last)]
        kv = tuple(dict.fromkeys(read))
        even = not kv or [head for head in kv for _ in range(len(read) // len(kv))] == read
        shares.append(HeadShare(first, last, kv, None if even else tuple(kv.index(head) for head in read)))
    return tuple(shares)


def to_heads(
    parts: list[Tensor],
    columns: list[list[tuple[int, ...]]],
    split: RowSplit,
    ranks: RowGroup,
) -> list[Tensor]:
    """Tensors (T, heads, size) of this rank's rows; `columns[i][r]` are the heads of tensor i that rank r gets. Returns
    all rows of those this rank gets."""
    rank, counts = ranks.rank, split.counts
    leaving, packed = [], []
    for other in range(len(counts)):
        pieces = [_heads(part, chosen[other]).flatten(1) for part, chosen in zip(parts, columns, strict=True)]
        row_TX = torch.cat(pieces, 1)
        leaving.append(row_TX.numel())
        packed.append(row_TX.reshape(-1))
    widths = [len(chosen[rank]) * part.shape[2] for part, chosen in zip(parts, columns, strict=True)]
    arriving = [count * sum(widths) for count in counts]
    found = all_to_all(torch.cat(packed), leaving, arriving, ranks)
    all_TX = split.ordered(found.view(split.tokens, sum(widths)))
    pieces = all_TX.split(widths, 1)
    return [
        piece.reshape(split.tokens, len(chosen[rank]), part.shape[2])
        for piece, chosen, part in zip(pieces, columns, parts, strict=True)
    ]


def to_rows(out_THC: Tensor, shares: tuple[HeadShare, ...], split: RowSplit, ranks: RowGroup) -> Tensor:
    """All rows of this rank's heads to this rank's rows of all heads."""
    rank, size = ranks.rank, out_THC.shape[2]
    count = split.counts[rank]
    leaving = [other * out_THC.shape[1] * size for other in split.counts]
    arriving = [count * share.heads * size for share in shares]
    found = all_to_all(split.by_rank(out_THC).reshape(-1), leaving, arriving, ranks)
    pieces = found.split(arriving)
    return torch.cat([piece.view(count, share.heads, size) for piece, share in zip(pieces, shares, strict=True)], 1)


def _heads(part_THC: Tensor, chosen: tuple[int, ...]) -> Tensor:
    """Heads that follow one another, as they always do."""
    return part_THC[:, chosen[0] : chosen[-1] + 1] if chosen else part_THC[:, :0]
