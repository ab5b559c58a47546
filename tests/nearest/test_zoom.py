"""Zoom: what is ranked by the file is what is found, in a fifth of the memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from moesaic.errors import UserError
from moesaic.kernels import native
from moesaic.nearest import exact, zoom
from moesaic.nearest.graph import GraphOptions
from tests.nearest.test_graph import clustered

pytestmark = pytest.mark.skipif(native.kernels() is None, reason="no C compiler")


@pytest.mark.parametrize("metric", ["inner_product", "l2"])
def test_finds_what_is_nearest_with_exact_scores(tmp_path: Path, metric: exact.Metric) -> None:
    rows_ND = clustered(1200, 128)
    np.save(tmp_path / "rows.npy", rows_ND)
    told: list[float] = []
    zoom.build(tmp_path / "rows.npy", tmp_path, metric, report=lambda what, part: told.append(part))
    assert told == sorted(told) and told[-1] == 1.0
    index = zoom.Zoom(tmp_path / "rows.npy", tmp_path)
    assert index.memory < (rows_ND.nbytes + 1200 * 65 * 4) / 3  # in 128 numbers; in 384 it is below a fifth
    queries_QD = clustered(1250, 128)[1200:]
    found_QK, scores_QK = index.search(queries_QD, 10, pool=100)
    true_QK, best_QK = exact.search(rows_ND, queries_QD, 10, metric)
    assert np.mean([len(set(a) & set(b)) for a, b in zip(found_QK.tolist(), true_QK.tolist(), strict=True)]) > 9.7
    same = found_QK == true_QK
    np.testing.assert_allclose(scores_QK[same], best_QK[same], rtol=1e-4, atol=1e-5)
    index.close()


def test_memory_is_a_fifth_of_full_vectors_and_hnsw() -> None:
    """Of 384 numbers: 4 bits each, a unit and a length, 32 edges; beside 4 bytes each and the 64 edges of HNSW."""
    ours = 384 // 2 + 8 + 4 * GraphOptions().degree
    assert ours <= (4 * 384 + 4 * 64) / 5


def test_a_graph_of_other_vectors_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "rows.npy", clustered(50, 16))
    zoom.build(tmp_path / "rows.npy", tmp_path)
    np.save(tmp_path / "other.npy", clustered(51, 16))
    with pytest.raises(UserError, match="other vectors"):
        zoom.Zoom(tmp_path / "other.npy", tmp_path)
    with pytest.raises(UserError, match="float32"):
        np.save(tmp_path / "double.npy", np.ones((3, 3)))
        zoom.Zoom(tmp_path / "double.npy", tmp_path)
