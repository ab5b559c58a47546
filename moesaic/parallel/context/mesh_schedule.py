"""In which order a tile's blocks arrive, are computed and leave, so that something is always there to compute.

Greedy: what is brought in next is what makes most blocks computable for its bytes. While it travels, a share of what is
computable already is computed, other ranks' queries first, so that their results can leave while this rank's own are
computed. Every rank has the same order in its own tile, so the sends of one are the receipts of another.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, NamedTuple

from moesaic.parallel.context.mesh_tiles import Tile

Kind = Literal["queries", "keys", "query results", "key results"]


class Transfer(NamedTuple):
    """Block `number` of a tile's queries or keys comes, or what was found for it goes back. Block 0 is a rank's own."""

    kind: Kind
    number: int


class Step(NamedTuple):
    """Begin a transfer; while it travels, compute blocks (query block, key block) of what came before it."""

    transfer: Transfer | None
    blocks: tuple[tuple[int, int], ...]


class Costs(NamedTuple):
    """Bytes of a block: of its queries and of its keys as they come, and of what goes back; 0: nothing does."""

    queries: float
    keys: float
    query_results: float
    key_results: float = 0.0


@lru_cache(maxsize=64)
def greedy_schedule(tile: Tile, costs: Costs) -> tuple[Step, ...]:
    queries, keys = 1, 1  # blocks that are here
    left = {(query, key) for query in range(tile.queries) for key in range(tile.keys)}
    results: list[Transfer] = []
    results += [Transfer("query results", number) for number in range(1, tile.queries) if costs.query_results]
    results += [Transfer("key results", number) for number in range(1, tile.keys) if costs.key_results]
    steps: list[Step] = []
    while left or results:
        transfer = _next_in(tile, costs, queries, keys) or _next_out(results, left)
        here = sorted((block for block in left if block[0] < queries and block[1] < keys), key=_order(left))
        arriving = tile.queries - queries + tile.keys - keys
        blocks = here[: -(-len(left) // (arriving + len(results) + 1))]
        left -= set(blocks)
        steps.append(Step(transfer, tuple(blocks)))
        if transfer is None:
            continue
        if transfer.kind == "queries":
            queries += 1
        elif transfer.kind == "keys":
            keys += 1
        else:
            results.remove(transfer)
    return tuple(steps)


def _next_in(tile: Tile, costs: Costs, queries: int, keys: int) -> Transfer | None:
    """A block of queries makes as many blocks computable as there are keys here, and the other way round."""
    choices = []
    if queries < tile.queries:
        choices.append((keys / costs.queries, Transfer("queries", queries)))
    if keys < tile.keys:
        choices.append((queries / costs.keys, Transfer("keys", keys)))
    return max(choices, key=lambda choice: choice[0])[1] if choices else None


def _next_out(results: list[Transfer], left: set[tuple[int, int]]) -> Transfer | None:
    """Results that no block still adds to; where there are none yet, nothing travels meanwhile."""
    for transfer in results:
        side = 0 if transfer.kind == "query results" else 1
        if all(block[side] != transfer.number for block in left):
            return transfer
    return None


def _order(left: set[tuple[int, int]]):  # type: ignore[no-untyped-def]
    """Own queries last; else first what brings a block of queries, then one of keys, nearest to its end."""

    def place(block: tuple[int, int]) -> tuple[int, int, int, int, int]:
        query, key = block
        rest_of_query = sum(other[0] == query for other in left)
        rest_of_key = sum(other[1] == key for other in left)
        return int(query == 0), rest_of_query, int(key == 0), rest_of_key, query * 4096 + key

    return place
