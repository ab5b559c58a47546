"""Exact search equals sorting all scores, for any metric, blocks and mask."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moesaic.errors import UserError
from moesaic.nearest import exact


def by_sorting(rows_ND: np.ndarray, query_D: np.ndarray, metric: str, alive_N: np.ndarray) -> np.ndarray:
    """All scores in double precision; dead rows have none."""
    rows, query = rows_ND.astype(np.float64), query_D.astype(np.float64)
    if metric == "l2":
        scores_N = -np.square(rows - query).sum(axis=1)
    else:
        scores_N = rows @ query
    if metric == "cosine":
        scores_N /= np.maximum(np.linalg.norm(rows, axis=1) * np.linalg.norm(query), 1e-30)
    return np.where(alive_N, scores_N, -np.inf)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_equals_sorting(data: st.DataObject) -> None:
    seed, count = data.draw(st.integers(0, 10_000)), data.draw(st.integers(0, 90))
    dimensions, k = data.draw(st.integers(1, 19)), data.draw(st.integers(1, 100))
    metric: exact.Metric = data.draw(st.sampled_from(["inner_product", "cosine", "l2"]))
    random = np.random.default_rng(seed)
    rows_ND = random.normal(size=(count, dimensions)).astype(np.float32)
    alive_N = random.random(count) < data.draw(st.sampled_from([0.0, 0.3, 1.0]))
    queries_QD = random.normal(size=(3, dimensions)).astype(np.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exact, "BLOCK", 4 * dimensions * data.draw(st.integers(1, 40)))
        rows_QK, scores_QK = exact.search(rows_ND, queries_QD, k, metric, alive_N)
    assert rows_QK.shape == scores_QK.shape == (3, min(k, alive_N.sum()))
    for query_D, rows_K, scores_K in zip(queries_QD, rows_QK, scores_QK, strict=True):
        scores_N = by_sorting(rows_ND, query_D, metric, alive_N)
        assert len(set(rows_K.tolist())) == len(rows_K) and alive_N[rows_K].all()
        np.testing.assert_allclose(scores_K, np.sort(scores_N)[::-1][: len(rows_K)], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(scores_K, scores_N[rows_K], rtol=1e-4, atol=1e-5)


def test_equals_come_in_order_whatever_the_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    rows_ND = np.repeat(np.eye(3, dtype=np.float32), 7, axis=0)
    for block in (1, 2, 5, 21):
        monkeypatch.setattr(exact, "BLOCK", 12 * block)
        rows_QK, _ = exact.search(rows_ND, np.eye(3, dtype=np.float32), 9)
        assert rows_QK[1].tolist() == [*range(7, 14), 0, 1]


def test_a_query_alone_and_among_others_gives_the_same_bits() -> None:
    random = np.random.default_rng(0)
    rows_ND, queries_QD = (random.normal(size=(n, 33)).astype(np.float32) for n in (300, 9))
    rows_QK, scores_QK = exact.search(rows_ND, queries_QD, 10)
    for number in range(9):
        rows_1K, scores_1K = exact.search(rows_ND, queries_QD[number : number + 1], 10)
        assert (rows_1K[0] == rows_QK[number]).all() and (scores_1K[0] == scores_QK[number]).all()


def test_far_from_the_origin_distances_are_still_right() -> None:
    random = np.random.default_rng(0)
    rows_ND = (random.normal(size=(50, 8)) + 1000).astype(np.float32)
    rows_QK, scores_QK = exact.search(rows_ND, rows_ND[:5], 1, "l2")
    assert rows_QK[:, 0].tolist() == [0, 1, 2, 3, 4] and (scores_QK == 0).all()


def test_what_makes_no_sense_is_refused() -> None:
    rows_ND = np.ones((4, 3), dtype=np.float32)
    with pytest.raises(UserError, match="3 dimensions"):
        exact.search(rows_ND, np.ones((1, 2), dtype=np.float32), 1)
    with pytest.raises(UserError, match="at least 1"):
        exact.search(rows_ND, rows_ND, 0)
    with pytest.raises(UserError, match="inner_product"):
        exact.search(rows_ND, rows_ND, 1, "manhattan")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="finite"):
        exact.search(rows_ND, np.full((1, 3), np.nan, dtype=np.float32), 1)
