"""A scan over codes: what is nearest is found, with exact scores, whatever the threads."""

from __future__ import annotations

import numpy as np
import pytest

from moesaic.kernels import native
from moesaic.nearest import exact
from moesaic.nearest.scan import Scan

pytestmark = pytest.mark.skipif(native.kernels() is None, reason="no C compiler")


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("metric", ["inner_product", "l2"])
def test_finds_what_is_nearest(bits: int, metric: exact.Metric) -> None:
    random = np.random.default_rng(0)
    rows_ND = random.normal(size=(9000, 48)).astype(np.float32) * random.lognormal(0, 0.5, (9000, 1)).astype(np.float32)
    queries_QD = random.normal(size=(20, 48)).astype(np.float32)
    alive_N = random.random(9000) < 0.9
    scan = Scan(rows_ND, metric, bits)
    one, two = (scan.search(queries_QD, 10, 100, alive_N, threads) for threads in (1, 2))
    assert (one[0] == two[0]).all() and (one[1] == two[1]).all()
    true_QK, best_QK = exact.search(rows_ND, queries_QD, 10, metric, alive_N)
    assert (one[0] == true_QK).mean() > 0.99
    np.testing.assert_allclose(one[1], best_QK, rtol=1e-4, atol=1e-4)


def test_fewer_rows_than_asked_for() -> None:
    rows_ND = np.eye(3, dtype=np.float32)
    ids_QK, scores_QK = Scan(rows_ND).search(rows_ND[1:2], 5)
    assert ids_QK.tolist() == [[1, 0, 2, -1, -1]] and scores_QK[0, 0] == 1 and np.isneginf(scores_QK[0, 3:]).all()
