"""Documents of common words first (DeepSpeed Data Efficiency: rarity, -sum log p(token), p as counted).

    data: {curriculum: {name: rarity, pacing: linear}}
    data: {curriculum: {name: rarity, mean: true}}        # per token, so that length plays no part

Reads all tokens twice when a run begins (tens of millions a second); a column named `rarity` is used in its place.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from moesaic.data.curricula._pacing import Paced
from moesaic.data.curricula.column import by_column
from moesaic.data.shards import Shards

BLOCK = 1 << 22  # tokens at a time


@dataclass(frozen=True)
class Rarity(Paced):
    mean: bool = False

    def difficulty(self, data: Shards) -> np.ndarray:
        rarity = by_column(data, "rarity", False) if "rarity" in data.columns else vocabulary_rarity(data)
        return rarity / data.lengths if self.mean else rarity


def vocabulary_rarity(data: Shards) -> np.ndarray:
    """-sum log p(token) for each document, with p as counted over all documents."""
    counts = np.zeros(data.vocabulary, np.int64)
    for documents in _blocks(data):
        counts += np.bincount(_tokens(data, documents), minlength=data.vocabulary)
    surprise = -np.log(np.maximum(counts, 1) / max(data.tokens, 1))
    sums = [
        np.add.reduceat(surprise[_tokens(data, documents)], data.starts[documents] - data.starts[documents.start])
        for documents in _blocks(data)
    ]
    return np.concatenate(sums)


def _blocks(data: Shards) -> list[slice]:
    """Documents in groups of about BLOCK tokens."""
    numbers = data.starts // BLOCK
    borders = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), data.documents]
    return [slice(low, high) for low, high in pairwise(borders)]


def _tokens(data: Shards, documents: slice) -> np.ndarray:
    return data.gather(data.starts[documents], data.lengths[documents])
