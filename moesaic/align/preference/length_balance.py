"""ChatGLM-RLHF's length balancing: among pairs with a similar difference in length, as often the shorter is better.

People like longer answers a little, and a reward model learns that before it learns anything else. Where both sides of
a bucket count the same, length says nothing about which answer is better.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Literal

from moesaic.align.preference.pairs import Pair

Lengths = Literal["as_they_are", "weigh", "drop"]


def longer(pair: Pair) -> int:
    """By how many tokens the chosen answer is longer than the rejected one."""
    return sum(pair.chosen.learn) - sum(pair.rejected.learn)


def balanced(pairs: Sequence[Pair], how: Lengths) -> dict[int, float]:
    """The weight of each pair that is kept, by its number.

    Buckets are differences of 1, 2-3, 4-7, ... tokens. `weigh`: both sides of a bucket count the same, and the bucket
    as much as it has pairs; one that has a single side stays as it is. `drop`: of the larger side only as many are kept
    as the smaller one has, so that of a bucket with a single side nothing is.
    """
    if how == "as_they_are":
        return {pair.number: 1.0 for pair in pairs}
    buckets: dict[int, dict[bool, list[Pair]]] = defaultdict(lambda: {True: [], False: []})
    kept = {pair.number: 1.0 for pair in pairs if longer(pair) == 0}
    for pair in pairs:
        if difference := longer(pair):
            buckets[abs(difference).bit_length()][difference > 0].append(pair)
    for sides in buckets.values():
        smaller = min(map(len, sides.values()))
        size = sum(map(len, sides.values()))
        for side in sides.values():
            if how == "drop":
                kept |= {pair.number: 1.0 for pair in side[:smaller]}
            else:
                kept |= {pair.number: size / (2 * len(side)) if smaller else 1.0 for pair in side}
    return kept


def length_bias(pairs: Sequence[Pair]) -> float:
    """The weighted share of pairs of unequal length in which the longer answer is the chosen one; 0.5 is no bias."""
    unequal = [(pair.weight, longer(pair) > 0) for pair in pairs if longer(pair)]
    return sum(weight for weight, long in unequal if long) / max(sum(weight for weight, _ in unequal), 1e-9)
