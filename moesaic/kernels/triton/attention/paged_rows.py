"""Where the tokens of a flat batch stand in a paged cache, and how they are cut into tiles for attention."""

from dataclasses import dataclass

import torch
import triton

FEW = 8  # up to this many new tokens per sequence, pieces run side by side


@dataclass(frozen=True)
class Rows:
    """Where the tokens of a flat batch stand, on the device; only `longest` and the tile sizes are known to the host.

    A tile is (first row, how many rows) of one sequence; `few` tiles have at most `few_tokens`, `many` any number.
    """

    places_T: torch.Tensor  # int32: how many tokens of its sequence come before this one; -1 for a row that is none
    sequences_T: torch.Tensor  # int32
    table_SP: torch.Tensor  # int32: each sequence's pages
    longest: int  # no place is as large as this
    few_X2: torch.Tensor | None  # int32
    few_tokens: int = 1
    many_X2: torch.Tensor | None = None
    many_tokens: int = 0
    trees_TM: torch.Tensor | None = None  # int8: whether a token sees the m-th new token of its sequence
    cached_S: torch.Tensor | None = None  # int32: with trees, how many tokens of each sequence are no guesses
    early: bool = True  # all this was there before the forward began, and kernels may read it before they wait


def tile_tokens(group: int, wide: bool) -> int:
    """Tokens of a prompt that attend together, where so many heads share a key."""
    return max(1, (16 if wide else 64) // group)


def tiles_of(
    spans: list[tuple[int, int]], size: int, most_few: int = FEW
) -> tuple[list[tuple[int, int]], int, list[tuple[int, int]], int]:
    """Tiles of (first row, rows) for spans of (first row, rows): few and their size, many and their `size`."""
    few = [span for span in spans if span[1] <= most_few]
    many = [
        (at, min(size, start + count - at))
        for start, count in spans
        if count > most_few
        for at in range(start, start + count, size)
    ]
    most = triton.next_power_of_2(max((count for _, count in few), default=1))
    return few, most, many, size
