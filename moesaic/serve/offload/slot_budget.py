"""How many slots each layer's experts get of the bytes that are given: the same share everywhere.

Where that is less than a token's experts, layers of one shape share slots, so that few bytes still do.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from moesaic.errors import UserError


@dataclass(frozen=True)
class ExpertShape:
    """Of a layer's experts: how many, of how many bytes, how many of them a token needs; layers whose `kind` is equal
    can share slots."""

    count: int
    bytes: int
    per_token: int
    kind: Hashable = None


@dataclass(frozen=True)
class Pool:
    """So many slots for these layers."""

    slots: int
    layers: tuple[int, ...]


def divide(budget: int, shapes: Sequence[ExpertShape]) -> list[Pool]:
    """Never more bytes than the budget."""
    total = sum(shape.count * shape.bytes for shape in shapes)
    slots = [min(shape.count, budget * shape.count // total) for shape in shapes]
    if all(own >= shape.per_token for own, shape in zip(slots, shapes, strict=True)):
        left = budget - sum(own * shape.bytes for own, shape in zip(slots, shapes, strict=True))
        for number, shape in enumerate(shapes):  # what rounding left over
            if slots[number] < shape.count and shape.bytes <= left:
                slots[number] += 1
                left -= shape.bytes
        return [Pool(own, (number,)) for number, own in enumerate(slots)]
    kinds: dict[Hashable, list[int]] = {}
    for number, shape in enumerate(shapes):
        kinds.setdefault((shape.kind, shape.bytes), []).append(number)
    least = sum(max(shapes[number].per_token for number in alike) * shapes[alike[0]].bytes for alike in kinds.values())
    if budget < least:
        problem = f"{budget / 2**30:.3g} GiB do not hold the experts of one token"
        raise UserError("--expert-cache-gb", problem, f"Give at least {least / 2**30:.3g}.")
    pools = []
    for alike in kinds.values():
        first = shapes[alike[0]]
        needed = max(shapes[number].per_token for number in alike)
        rest = (budget - least) * sum(shapes[number].count * first.bytes for number in alike) // total
        own = needed + rest // first.bytes
        count = max(1, min(len(alike), own // (2 * needed)))
        pools += [Pool(own // count, tuple(alike[start::count])) for start in range(count)]
    return pools
