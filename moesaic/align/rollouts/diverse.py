"""FaithLens' filter for diversity: of many texts some that are unlike each other, the one furthest from all chosen so
far next (Gonzalez 1985). Texts are near that have many words and pairs of neighbouring words in common."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise


def diverse(texts: Sequence[str], count: int) -> list[int]:
    """The places of so many of them, in their order."""
    words = [text.split() for text in texts]
    bags = [frozenset(one) | frozenset(pairwise(one)) for one in words]
    chosen: list[int] = []
    apart = [2.0] * len(bags)
    while len(chosen) < min(count, len(bags)):
        furthest = max(range(len(bags)), key=lambda n: (apart[n], -n))
        chosen.append(furthest)
        apart = [min(before, distance(bag, bags[furthest])) for before, bag in zip(apart, bags, strict=True)]
        apart[furthest] = -1.0
    return sorted(chosen)


def distance(one: frozenset[object], other: frozenset[object]) -> float:
    """Jaccard's: 0 for the same, 1 for nothing in common."""
    return 1.0 - len(one & other) / max(1, len(one | other))
