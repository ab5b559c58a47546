"""Where experts should lie: from measured loads, so many on each rank and as equal a load as can be had greedily."""

from __future__ import annotations

from collections.abc import Sequence

from moesaic.errors import UserError


def place_experts(loads: Sequence[float], ranks: int) -> list[int]:
    """An order of the experts, of which each rank takes the next len / ranks: the heaviest first, each to the rank with
    the least load that still has room."""
    if len(loads) % ranks:
        raise UserError("placement", f"{ranks} ranks do not divide {len(loads)} experts", "Every rank holds as many.")
    room, placed, held = len(loads) // ranks, [0.0] * ranks, [list[int]() for _ in range(ranks)]
    for expert in sorted(range(len(loads)), key=lambda expert: (-loads[expert], expert)):
        rank = min((rank for rank in range(ranks) if len(held[rank]) < room), key=lambda rank: (placed[rank], rank))
        placed[rank] += loads[expert]
        held[rank].append(expert)
    return [expert for experts in held for expert in sorted(experts)]


def imbalance(loads: Sequence[float], ranks: int, order: Sequence[int] | None = None) -> float:
    """Load of the busiest rank over the mean: how much longer experts take than they would in balance."""
    order, here = order or range(len(loads)), len(loads) // ranks
    per_rank = [sum(loads[expert] for expert in order[rank * here : (rank + 1) * here]) for rank in range(ranks)]
    return max(per_rank) * ranks / sum(per_rank) if sum(per_rank) else 1.0
