"""Rows between tensor-parallel ranks: gathered from all, or summed and scattered to their owners, in tiles.

A tile is a share of every rank's rows. All tiles of a collective are begun before the first is waited for, so that one
travels while another is multiplied. Scattering sends partial rows to their owner, who adds them up when all are there,
in float32: the sum does not depend on tiles, and costs the bytes of a ring.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moesaic.parallel.rows import RowGroup

# The collective got another name in newer torch, which warns of the old one.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True)
class Chunks:
    """`total` rows divided among ranks: contiguous, at most one row more for some than for others, perhaps none."""

    total: int
    ranks: int

    def of(self, rank: int) -> slice:
        return slice(self.total * rank // self.ranks, self.total * (rank + 1) // self.ranks)

    def tile(self, rank: int, number: int, tiles: int) -> slice:
        """Tile `number` of a rank's chunk, as rows of the whole."""
        chunk = self.of(rank)
        size = chunk.stop - chunk.start
        return slice(chunk.start + size * number // tiles, chunk.start + size * (number + 1) // tiles)

    def sizes(self, number: int = 0, tiles: int = 1) -> list[int]:
        found = [self.tile(rank, number, tiles) for rank in range(self.ranks)]
        return [rows.stop - rows.start for rows in found]


class TileExchange(RowGroup):
    """Collectives that are begun, and waited for by whoever needs what they bring."""

    def begin_gather(self, own_ND: Tensor, chunks: Chunks, *, backward: bool = False) -> Gathering:
        return self.begin_gathers(own_ND, chunks, 1, backward=backward)[0]

    def begin_gathers(self, own_ND: Tensor, chunks: Chunks, tiles: int, *, backward: bool = False) -> list[Gathering]:
        """All ranks' rows, in tiles. A rank with a row less than others sends one that nobody reads."""
        first, begun = chunks.of(self.rank).start, []
        for number in range(tiles):
            rows, sizes = chunks.tile(self.rank, number, tiles), chunks.sizes(number, tiles)
            tile_ND = own_ND[rows.start - first : rows.stop - first].contiguous()
            if len(tile_ND) < max(sizes):
                tile_ND = torch.cat([tile_ND, tile_ND.new_zeros(1, *own_ND.shape[1:])])
            found_AD = own_ND.new_empty(max(sizes) * self.size, *own_ND.shape[1:])
            work = _all_gather(found_AD, tile_ND, group=self.group, async_op=True) if max(sizes) else None
            self.traffic.count(tile_ND.nbytes * (self.size - 1), backward=backward)
            begun.append(Gathering(tile_ND, found_AD, work, sizes))
        return begun

    def begin_scatter(self, parts_AD: Tensor, sizes: list[int], *, backward: bool = False) -> Scattering:
        """Rows for every rank, in the order of ranks, as many as `sizes` says; from each come as many as it has for
        this one."""
        return self._begin(parts_AD, sizes, [sizes[self.rank]] * self.size, backward)

    def begin_scatter_others(self, parts_AD: Tensor, sizes: list[int], *, backward: bool = False) -> Scattering:
        """The same, with this rank's own rows left out."""
        leaving, arriving = list(sizes), [sizes[self.rank]] * self.size
        leaving[self.rank] = arriving[self.rank] = 0
        return self._begin(parts_AD, leaving, arriving, backward)

    def add_copies(self, own_OI: Tensor, copies: int) -> Tensor:
        """The sum over `copies` ranks in a row that hold the same: the same bits on each."""
        begin = self.rank // copies * copies
        holders = range(begin, begin + copies)
        counts = [len(own_OI) if rank in holders and rank != self.rank else 0 for rank in range(self.size)]
        found = self._begin(own_OI.repeat(copies - 1, 1), counts, counts, backward=True).wait()
        found[self.rank] = own_OI
        return summed(torch.stack([found[rank] for rank in holders]))

    def _begin(self, parts_AD: Tensor, leaving: list[int], arriving: list[int], backward: bool) -> Scattering:
        parts_AD = parts_AD.contiguous()
        found_AD = parts_AD.new_empty(sum(arriving), *parts_AD.shape[1:])
        work = dist.all_to_all_single(found_AD, parts_AD, arriving, leaving, group=self.group, async_op=True)
        row_bytes = parts_AD.element_size() * parts_AD.shape[1:].numel()
        self.traffic.count(row_bytes * (sum(leaving) - leaving[self.rank]), backward=backward)
        return Scattering(parts_AD, found_AD, work, arriving)


@dataclass
class Gathering:
    """A tile on its way from all ranks; what is sent is held until it is there."""

    sent_ND: Tensor
    found_AD: Tensor
    work: Any
    sizes: list[int]

    def wait(self) -> list[Tensor]:
        """Each rank's rows."""
        if self.work is not None:
            self.work.wait()
        widest = len(self.found_AD) // len(self.sizes)
        blocks = self.found_AD.split(widest) if widest else [self.found_AD] * len(self.sizes)
        return [block[:size] for block, size in zip(blocks, self.sizes, strict=True)]

    def whole(self) -> Tensor:
        """All rows in order; without a copy where all ranks have as many."""
        blocks = self.wait()
        return self.found_AD if len(self.found_AD) == sum(self.sizes) else torch.cat(blocks)


@dataclass
class Scattering:
    sent_AD: Tensor
    found_AD: Tensor
    work: Any
    sizes: list[int]

    def wait(self) -> list[Tensor]:
        """What came from each rank."""
        self.work.wait()
        return list(self.found_AD.split(self.sizes))

    def total(self) -> Tensor:
        """The sum of what came, as many rows from each rank."""
        self.work.wait()
        return summed(self.found_AD.view(len(self.sizes), self.sizes[0], *self.found_AD.shape[1:]))


def summed(parts_RND: Tensor) -> Tensor:
    """Over ranks, in one pass, in float32 or better."""
    wide = torch.promote_types(parts_RND.dtype, torch.float32)
    return parts_RND.sum(0, dtype=wide).to(parts_RND.dtype)
