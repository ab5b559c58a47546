"""Rows between tensor-parallel ranks: gathered from all, or summed and scattered to their owners, in tiles.

A tile is a share of every rank's rows. All tiles of a collective are begun before the first is waited for, so that one
travels while another is multiplied. Scattering sends partial rows to their owner, who adds them up in the order of
ranks, in float32: the sum does not depend on tiles, and costs the bytes of a ring.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

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


class TensorExchange:
    """`gathered_bytes` and `scattered_bytes` count what leaves this rank, forward and backward."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group: Any = group if group is not None else dist.group.WORLD
        self.ranks = dist.get_world_size(self.group)
        self.rank = dist.get_rank(self.group)
        self.gathered_bytes = 0
        self.scattered_bytes = 0

    @property
    def sent_bytes(self) -> int:
        return self.gathered_bytes + self.scattered_bytes

    def gather(self, own_ND: Tensor, chunks: Chunks) -> Gathering:
        return next(self.gather_tiles(own_ND, chunks, 1))

    def gather_tiles(self, own_ND: Tensor, chunks: Chunks, tiles: int) -> Iterator[Gathering]:
        """Each tile begins when it is asked for. A rank with a row less than others sends one that nobody reads."""
        first = chunks.of(self.rank).start
        for number in range(tiles):
            rows = chunks.tile(self.rank, number, tiles)
            widest = max(chunks.sizes(number, tiles))
            tile_ND = own_ND[rows.start - first : rows.stop - first].contiguous()
            if len(tile_ND) < widest:
                spare = tile_ND.new_zeros(widest - len(tile_ND), *own_ND.shape[1:])
                tile_ND = torch.cat([tile_ND, spare])
            found_AD = own_ND.new_empty(widest * self.ranks, *own_ND.shape[1:])
            work = None
            if widest:
                work = _all_gather(found_AD, tile_ND, group=self.group, async_op=True)
            self.gathered_bytes += tile_ND.nbytes * (self.ranks - 1)
            yield Gathering(tile_ND, found_AD, work, chunks.sizes(number, tiles))

    def scatter(self, parts_AD: Tensor, sizes: list[int]) -> Scattering:
        """Rows for every rank, in the order of ranks, as many as `sizes` says (none for this rank if it keeps its own):
        begins their way to it. Every rank's rows are as many as this rank's, when they arrive."""
        return self._send(parts_AD, sizes, [sizes[self.rank]] * self.ranks)

    def scatter_others(self, parts_AD: Tensor, sizes: list[int]) -> Scattering:
        """The same, with this rank's own rows left out."""
        leaving, arriving = list(sizes), [sizes[self.rank]] * self.ranks
        leaving[self.rank] = arriving[self.rank] = 0
        return self._send(parts_AD, leaving, arriving)

    def add_copies(self, own_OI: Tensor, copies: int) -> Tensor:
        """The sum over `copies` ranks in a row that hold the same, in the order of ranks: the same bits on each."""
        begin = self.rank // copies * copies
        holders = range(begin, begin + copies)
        counts = [len(own_OI) if rank in holders and rank != self.rank else 0 for rank in range(self.ranks)]
        others = self._send(own_OI.repeat(copies - 1, 1), counts, counts).wait()
        others[self.rank] = own_OI
        return summed([others[rank] for rank in holders])

    def _send(self, parts_AD: Tensor, leaving: list[int], arriving: list[int]) -> Scattering:
        parts_AD = parts_AD.contiguous()
        found_AD = parts_AD.new_empty(sum(arriving), *parts_AD.shape[1:])
        work = dist.all_to_all_single(found_AD, parts_AD, arriving, leaving, group=self.group, async_op=True)
        row_bytes = parts_AD.element_size() * parts_AD.shape[1:].numel()
        self.scattered_bytes += row_bytes * (sum(leaving) - leaving[self.rank])
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
        if self.work is not None:
            self.work.wait()
        return list(self.found_AD.split(self.sizes))


def summed(parts: list[Tensor]) -> Tensor:
    """In the order given, in float32 or better."""
    narrow = parts[0].dtype
    wide = torch.promote_types(narrow, torch.float32)
    total = parts[0].to(wide)
    for number, part in enumerate(parts[1:]):
        total = total + part if number == 0 else total.add_(part)  # the first may be somebody else's memory
    return total.to(narrow)
