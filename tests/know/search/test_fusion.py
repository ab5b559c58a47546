"""Ranked lists as one."""

from __future__ import annotations

import numpy as np
import pytest

from moesaic.know.search.fusion import Ranked, normalised, reciprocal_rank


def ranked(**scores: float) -> Ranked:
    return np.array([int(row[1:]) for row in scores]), np.array(list(scores.values()))


def test_reciprocal_rank_by_hand() -> None:
    rows, scores = reciprocal_rank([ranked(r4=9.0, r2=8.0), ranked(r2=0.3)], offset=60)
    assert rows.tolist() == [2, 4]
    assert scores.tolist() == pytest.approx([1 / 62 + 1 / 61, 1 / 61])


def test_normalised_scores_by_hand() -> None:
    rows, scores = normalised([ranked(r7=10.0, r1=5.0), ranked(r1=0.6, r7=0.5, r3=0.4)], depth=3)
    # The first list is shorter than the depth, so it ends at 0; the second ends at its last.
    assert dict(zip(rows.tolist(), scores.tolist(), strict=True)) == pytest.approx({7: 0.75, 1: 0.75, 3: 0.0})
    assert rows.tolist() == [1, 7, 3]  # of equals, the earlier row


def test_nothing_and_equal_scores() -> None:
    assert normalised([])[0].tolist() == [] and reciprocal_rank([])[0].tolist() == []
    empty = (np.zeros(0, np.int64), np.zeros(0))
    assert normalised([empty])[0].tolist() == []
    assert normalised([ranked(r5=2.0, r3=2.0)], depth=2)[1].tolist() == [1.0, 1.0]
    assert normalised([ranked(r5=-2.0, r3=-3.0)])[1].tolist() == [1.0, 0.0]
