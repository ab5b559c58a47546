"""Mesh-Attention's shape: which blocks of queries meet which blocks of keys on which rank, and what that sends.

N ranks have a block of queries and a block of keys and values each. A rank computes a tile, `a` blocks of queries by
`b` blocks of keys, a x b = N. Ranks stand in a grid of b rows and a columns: queries are gathered along a row, keys and
values along a column, and a row adds up the outputs of its queries. 1 x N is ring attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Tile(NamedTuple):
    queries: int
    keys: int


@dataclass(frozen=True)
class Place:
    """Where a rank stands: row and column of the grid."""

    rank: int
    tile: Tile

    @property
    def row(self) -> int:
        return self.rank // self.tile.queries

    @property
    def column(self) -> int:
        return self.rank % self.tile.queries

    def across(self, steps: int) -> int:
        """The rank that many columns to the left in this row: it has query block `steps` of this rank's tile."""
        return self.row * self.tile.queries + (self.column - steps) % self.tile.queries

    def down(self, steps: int) -> int:
        """The rank that many rows above in this column, which has key block `steps`."""
        return (self.row - steps) % self.tile.keys * self.tile.queries + self.column


class RowBytes(NamedTuple):
    """What a row brings, in bytes: its queries, what travels for its keys and values, its outputs, and one float32
    number for each head (the log-sum-exp of its scores)."""

    queries: int
    keys_values: int
    outputs: int
    sums: int


class Volume(NamedTuple):
    """Bytes that leave a rank."""

    forward: float
    backward: float

    @property
    def both(self) -> float:
        return self.forward + self.backward


def mesh_volume(tile: Tile, row: RowBytes, rows: float) -> Volume:
    """With `rows` on each rank and no block masked. Forward: queries out, keys and values out, outputs back to their
    rank. Backward: both again, with the outputs' gradients, log-sum-exps and the outputs' products with their
    gradients; and gradients of queries, keys and values back to their ranks."""
    across, down = tile.queries - 1, tile.keys - 1
    forward = across * (row.queries + row.outputs + row.sums) + down * row.keys_values
    backward = across * (2 * row.queries + row.outputs + 2 * row.sums) + down * 2 * row.keys_values
    return Volume(rows * forward, rows * backward)


def ring_volume(ranks: int, row: RowBytes, rows: float) -> Volume:
    return mesh_volume(Tile(1, ranks), row, rows)


def ulysses_volume(ranks: int, row: RowBytes, rows: float) -> Volume:
    """With heads that divide evenly, key and value heads too."""
    once = rows * (ranks - 1) / ranks * (row.queries + row.keys_values + row.outputs)
    return Volume(once, once)


def best_tile(ranks: int, row: RowBytes) -> Tile:
    """The shape that sends least; of equal ones the one with fewest queries, whose outputs need no adding up."""
    shapes = [Tile(queries, ranks // queries) for queries in range(1, ranks + 1) if ranks % queries == 0]
    return min(shapes, key=lambda tile: mesh_volume(tile, row, 1).both)
