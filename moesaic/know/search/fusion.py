"""Several ranked lists as one: by reciprocal rank (Cormack and others), or by normalised scores.

A list is rows and scores, the best first.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Ranked = tuple[np.ndarray, np.ndarray]
RANK_OFFSET = 60  # of the paper: how little the first ranks count above the next
DEPTH = 100  # rows of each list that are looked at


def reciprocal_rank(lists: Sequence[Ranked], offset: int = RANK_OFFSET) -> Ranked:
    """Each row's sum of 1 / (offset + rank)."""
    return _summed([(rows, 1.0 / (offset + 1 + np.arange(len(rows)))) for rows, _ in lists])


def normalised(lists: Sequence[Ranked], depth: int = DEPTH) -> Ranked:
    """Each row's mean over the lists of its score, where the best of a list counts 1 and the last of its first `depth`
    counts 0; a list that is shorter ends at the score 0. How much better the best is counts, not only that it is."""
    scaled = []
    for rows, scores in lists:
        rows, scores = rows[:depth], np.asarray(scores[:depth], dtype=np.float64)
        low = float(scores[-1]) if len(scores) == depth else min(0.0, float(scores.min(initial=0.0)))
        high = float(scores.max(initial=low))
        scaled.append((rows, (scores - low) / (high - low) if high > low else np.ones(len(rows))))
    rows, scores = _summed(scaled)
    return rows, scores / max(1, len(lists))


def best(rows: np.ndarray, scores: np.ndarray, k: int | None = None) -> Ranked:
    """The best first; of equals, the earlier row."""
    order = np.lexsort((rows, -scores))[:k]
    return rows[order], scores[order]


def _summed(lists: Sequence[Ranked]) -> Ranked:
    if not lists:
        return np.zeros(0, np.int64), np.zeros(0)
    rows, place = np.unique(np.concatenate([rows for rows, _ in lists]).astype(np.int64), return_inverse=True)
    return best(rows, np.bincount(place, np.concatenate([scores for _, scores in lists]), minlength=len(rows)))
