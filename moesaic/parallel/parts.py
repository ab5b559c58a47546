"""Which part of every parameter lies on this rank, in terms of the whole one: so a checkpoint knows no layout.

A parameter is divided twice: by what a rank computes with (its experts, its heads), which is a `Part`; and what the
rank then holds is divided by rows among those that compute with the same part (FSDP). `regions` puts both together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

Slices = tuple[slice, ...]


@dataclass(frozen=True)
class Part:
    """Pieces [start, stop) of dimension `dim`, which follow each other in a rank's own tensor. `copies` says how many
    ranks hold a piece, if several do: whoever sums something over ranks, such as a norm, counts it once. `copy` is
    which of them this rank is."""

    dim: int
    pieces: tuple[tuple[int, int], ...]
    copies: tuple[int, ...] = ()
    copy: int = 0

    @property
    def size(self) -> int:
        return sum(stop - start for start, stop in self.pieces)

    def shape(self, whole: Sequence[int]) -> tuple[int, ...]:
        return (*whole[: self.dim], self.size, *whole[self.dim + 1 :])

    @property
    def counted(self) -> list[bool]:
        """Of each piece, whether this rank is the first that holds it."""
        return [self.copy == 0 or copies == 1 for copies in self.copies or (1,) * len(self.pieces)]

    @property
    def lengths(self) -> list[int]:
        return [stop - start for start, stop in self.pieces]

    def take(self, whole: Tensor) -> Tensor:
        return torch.cat([whole.narrow(self.dim, start, stop - start) for start, stop in self.pieces], self.dim)

    def squares(self, own: Tensor, first: int = 0) -> Tensor:
        """The sum of squares of a rank's rows from `first` on, each piece's divided by its copies."""
        if self.dim or max(self.copies, default=1) == 1:
            return torch.linalg.vector_norm(own, dtype=torch.float32).square()
        total, begin = torch.zeros((), device=own.device), 0
        for length, copies in zip(self.lengths, self.copies, strict=True):
            rows = own[max(begin - first, 0) : max(begin + length - first, 0)]
            total = total + torch.linalg.vector_norm(rows, dtype=torch.float32).square() / copies
            begin += length
        return total


class Region(NamedTuple):
    """A box of the whole tensor, and where it lies in this rank's."""

    whole: Slices
    here: Slices


def regions(
    shape: Sequence[int], part: Part | None = None, rows: tuple[int, int] | None = None, *, once: bool = False
) -> list[Region]:
    """Of a whole tensor of `shape`, what a rank holds that computes with `part` and keeps `rows` of it. `once`: without
    what another rank holds too, and counts."""
    if not shape:
        return [Region((), ())]
    dim, pieces = (part.dim, part.pieces) if part is not None else (0, ((0, shape[0]),))
    wanted = part.counted if part is not None and once else [True] * len(pieces)
    first, last = rows if rows is not None else (0, part.shape(shape)[0] if part is not None else shape[0])
    found, at = [], 0
    for (start, stop), mine in zip(pieces, wanted, strict=True):
        here = at, at + stop - start
        at = here[1]
        if not mine:
            continue
        if dim == 0:  # rows of the part are rows of the whole, further on
            begin, end = max(here[0], first), min(here[1], last)
            if begin >= end:
                continue
            shift = start - here[0]
            whole, own = [slice(begin + shift, end + shift)], [slice(begin - first, end - first)]
            whole += [slice(0, size) for size in shape[1:]]
            own += [slice(0, size) for size in shape[1:]]
        else:
            if first >= last:
                continue
            whole = [slice(0, size) for size in shape]
            own = [slice(0, size) for size in shape]
            whole[0], own[0] = slice(first, last), slice(0, last - first)
            whole[dim], own[dim] = slice(start, stop), slice(*here)
        found.append(Region(tuple(whole), tuple(own)))
    return found


def overlap(region: Region, box: Slices) -> tuple[Region, Slices] | None:
    """What a region has in common with a box of the whole tensor, and where that lies in the box."""
    whole, here, inside = [], [], []
    for mine, own, other in zip(region.whole, region.here, box, strict=True):
        start, stop = max(mine.start, other.start), min(mine.stop, other.stop)
        if start >= stop:
            return None
        whole.append(slice(start, stop))
        here.append(slice(own.start + start - mine.start, own.start + stop - mine.start))
        inside.append(slice(start - other.start, stop - other.start))
    return Region(tuple(whole), tuple(here)), tuple(inside)
