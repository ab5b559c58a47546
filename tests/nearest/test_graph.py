"""The graph: every edge by the rule, every vector reachable, the same whatever the threads; walks find what is near."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from moesaic.errors import UserError
from moesaic.kernels import native
from moesaic.nearest import exact
from moesaic.nearest.codes import Codes
from moesaic.nearest.graph import NOBODY, Graph, GraphOptions, Searcher
from moesaic.nearest.groups import group, neighbour_lists
from moesaic.nearest.inner_product import InnerProducts, lengthened

pytestmark = pytest.mark.skipif(native.kernels() is None, reason="no C compiler")
COUNT, SIZE = 1500, 40
OPTIONS = GraphOptions(degree=12, candidates=40, group=150, overlap=4)


def clustered(count: int, size: int, seed: int = 0) -> np.ndarray:
    random = np.random.default_rng(seed)
    centres_CD = random.normal(size=(20, size))
    drawn_ND = centres_CD[random.integers(0, 20, count)] + 0.6 * random.normal(size=(count, size))
    return exact.unit(drawn_ND.astype(np.float32))


@pytest.fixture(scope="module")
def rows_ND() -> np.ndarray:
    return clustered(COUNT, SIZE)


@pytest.fixture(scope="module")
def codes(rows_ND: np.ndarray) -> Codes:
    return Codes.of(rows_ND, 8)


@pytest.fixture(scope="module", params=[0, 16], ids=["lists", "walks"])
def graph(request: pytest.FixtureRequest, rows_ND: np.ndarray, codes: Codes) -> Graph:
    return Graph.of(rows_ND, codes, options=GraphOptions(**{**vars(OPTIONS), "walk": request.param}), threads=2)


def distances(codes: Codes) -> np.ndarray:
    points_NP = codes.decoded()
    squares_N = np.square(points_NP).sum(axis=1)
    return np.maximum(squares_N[:, None] + squares_N - 2 * points_NP @ points_NP.T, 0)


@pytest.mark.parametrize(("bits", "error"), [(8, 0.02), (4, 0.15)])
def test_codes_stand_for_the_vectors(rows_ND: np.ndarray, bits: int, error: float) -> None:
    """A rotation keeps inner products; rounding changes them a little, and no more for large vectors than for small."""
    for scale in (1.0, 1e-3, 1e4):
        scaled_ND = rows_ND[:200] * np.float32(scale)
        decoded_NP = Codes.of(scaled_ND, bits).decoded()
        centred_ND = scaled_ND - scaled_ND.mean(axis=0)
        wrong = decoded_NP @ decoded_NP.T - centred_ND.astype(np.float64) @ centred_ND.T
        assert np.abs(wrong).max() < error * scale**2


def test_groups_hold_everyone_as_often_as_asked(rows_ND: np.ndarray) -> None:
    groups = group(rows_ND, rows_ND.mean(axis=0), 150, 4, seed=0)
    assert (np.bincount(groups.members_M, minlength=COUNT) == 4).all()
    for first, last in zip(groups.starts_G, groups.starts_G[1:], strict=False):
        assert len(np.unique(groups.members_M[first:last])) == last - first


def test_lists_are_exact_within_one_group(rows_ND: np.ndarray, codes: Codes) -> None:
    one = group(rows_ND, codes.middle_D, COUNT, 1, seed=0)
    lists_NK = neighbour_lists(codes, one, 20, threads=2)
    far_NN = distances(codes)
    np.fill_diagonal(far_NN, np.inf)
    np.testing.assert_allclose(lists_NK["far"], np.sort(far_NN, axis=1)[:, :20], rtol=1e-4, atol=1e-6)
    for me, ids in enumerate(lists_NK["id"]):
        assert len(set(ids.tolist()) | {me}) == 21
        np.testing.assert_allclose(far_NN[me, ids], lists_NK["far"][me], rtol=1e-4, atol=1e-6)


def test_every_edge_keeps_the_rule(graph: Graph, codes: Codes) -> None:
    far_NN = distances(codes)
    tree = {(int(a), int(b)) for a, b in graph.tree_X2}
    chosen = 0
    for me, links in enumerate(graph.links_NR):
        edges = [int(other) for other in links if other != NOBODY]
        assert len(edges) <= OPTIONS.degree and me not in edges and len(set(edges)) == len(edges)
        kept = [other for other in edges if (me, other) not in tree]
        assert (np.diff(far_NN[me, kept]) > -1e-6).all()  # nearest first
        for number, other in enumerate(kept):
            assert all(far_NN[nearer, other] > far_NN[me, other] - 1e-6 for nearer in kept[:number])
        chosen += len(kept)
    assert chosen > 3 * COUNT


def test_everything_is_reachable_from_the_navigating_node(graph: Graph) -> None:
    assert reached(graph) == set(range(COUNT))


def reached(graph: Graph) -> set[int]:
    seen, waiting = {int(graph.entries_G[0])}, [int(graph.entries_G[0])]
    while waiting:
        fresh = {int(other) for other in graph.links_NR[waiting.pop()] if other != NOBODY} - seen
        seen |= fresh
        waiting += fresh
    return seen


def test_islands_and_copies_are_connected_within_the_degree() -> None:
    """Points that nobody chose, and many times the same point: the tree reaches them."""
    random = np.random.default_rng(1)
    islands_ND = np.concatenate([random.normal(size=(60, 8)) * 0.01 + 100 * i for i in range(8)] + [np.ones((90, 8))])
    islands_ND = islands_ND.astype(np.float32)
    made = Graph.of(
        islands_ND, Codes.of(islands_ND, 8), "l2", GraphOptions(degree=4, candidates=8, group=60, overlap=1), threads=2
    )
    assert len(made.tree_X2) > 0 and reached(made) == set(range(len(islands_ND)))
    assert (made.links_NR != NOBODY).sum(axis=1).max() <= 4


def test_threads_make_no_difference(rows_ND: np.ndarray, codes: Codes, graph: Graph) -> None:
    options = GraphOptions(**{**vars(OPTIONS), "walk": 24})
    one, two = (Graph.of(rows_ND, codes, options=options, threads=threads) for threads in (1, 2))
    assert (one.links_NR == two.links_NR).all() and (one.entries_G == two.entries_G).all()
    searcher = Searcher(graph, codes, rows_ND)
    alone, together = (searcher.search(rows_ND[:50], 5, threads=threads) for threads in (1, 2))
    assert (alone[0] == together[0]).all() and (alone[1] == together[1]).all()


def test_paths_of_the_whole_mrng_are_monotonic() -> None:
    """All others are candidates and there is no bound: from any point greedy steps lead to any other, always nearer."""
    rows_ND = clustered(150, 10, seed=3)
    codes = Codes.of(rows_ND, 8)
    options = GraphOptions(degree=151, candidates=149, group=1000, overlap=1)
    links_NR = Graph.of(rows_ND, codes, "l2", options).links_NR
    far_NN = distances(codes)
    for target in range(150):
        for start in range(150):
            at, steps = start, 0
            while at != target:
                edges = links_NR[at][links_NR[at] != NOBODY].astype(np.int64)
                best = int(edges[far_NN[target, edges].argmin()])
                assert far_NN[target, best] < far_NN[target, at]
                at, steps = best, steps + 1
            assert steps < 150


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("metric", ["inner_product", "l2", "cosine"])
def test_a_walk_finds_nearly_what_is_nearest(rows_ND: np.ndarray, bits: int, metric: exact.Metric) -> None:
    graph = Graph.of(rows_ND, Codes.of(rows_ND, 8), metric, OPTIONS)
    queries_QD = clustered(COUNT + 100, SIZE)[COUNT:] * np.float32(3 if metric == "cosine" else 1)
    found_QK, scores_QK = Searcher(graph, Codes.of(rows_ND, bits), rows_ND).search(queries_QD, 10, pool=80)
    true_QK, best_QK = exact.search(rows_ND, queries_QD, 10, metric)
    hits = [len(set(a) & set(b)) for a, b in zip(found_QK.tolist(), true_QK.tolist(), strict=True)]
    assert np.mean(hits) > 9.7
    same = found_QK == true_QK
    np.testing.assert_allclose(scores_QK[same], best_QK[same], rtol=1e-4, atol=1e-5)
    assert (np.diff(scores_QK, axis=1) <= 0).all()


def test_the_dead_are_walked_through_and_not_found(rows_ND: np.ndarray, codes: Codes, graph: Graph) -> None:
    alive_N = np.random.default_rng(5).random(COUNT) < 0.5
    found_QK, _ = Searcher(graph, codes, rows_ND).search(rows_ND[:80], 10, pool=120, alive_N=alive_N)
    true_QK, _ = exact.search(rows_ND, rows_ND[:80], 10, alive_N=alive_N)
    assert alive_N[found_QK[found_QK >= 0]].all()
    assert np.mean([len(set(a) & set(b)) for a, b in zip(found_QK.tolist(), true_QK.tolist(), strict=True)]) > 9.7


def test_a_graph_on_disk_is_the_same(rows_ND: np.ndarray, codes: Codes, graph: Graph, tmp_path: Path) -> None:
    graph.save(tmp_path)
    codes.save(tmp_path)
    again = Searcher(Graph.load(tmp_path), Codes.load(tmp_path, 8), rows_ND)
    before, after = Searcher(graph, codes, rows_ND).search(rows_ND[:40], 10), again.search(rows_ND[:40], 10)
    assert (before[0] == after[0]).all() and (before[1] == after[1]).all()
    assert again.graph.metric == graph.metric and (again.graph.tree_X2 == graph.tree_X2).all()


@pytest.mark.parametrize("count", [1, 2, 5, 33])
def test_few_vectors(count: int) -> None:
    rows_ND = clustered(count, 7)
    codes = Codes.of(rows_ND, 8)
    graph = Graph.of(rows_ND, codes)
    found_QK, _ = Searcher(graph, codes, rows_ND).search(rows_ND, 40)
    assert all(sorted(row[row >= 0]) == list(range(count)) for row in found_QK)


def test_none_at_all_are_refused() -> None:
    empty_ND = np.empty((0, 7), dtype=np.float32)
    with pytest.raises(UserError, match="no vectors"):
        Graph.of(empty_ND, Codes.of(empty_ND, 8))


def test_inner_products_of_rows_of_several_lengths() -> None:
    random = np.random.default_rng(0)
    rows_ND = clustered(COUNT, SIZE) * random.lognormal(0, 0.15, size=(COUNT, 1)).astype(np.float32)
    long_NE = lengthened(rows_ND)
    np.testing.assert_allclose(np.linalg.norm(long_NE, axis=1), np.linalg.norm(rows_ND, axis=1).max(), rtol=1e-5)
    queries_QD = clustered(COUNT + 60, SIZE)[COUNT:]
    found_QK, scores_QK = InnerProducts(rows_ND, OPTIONS).search(queries_QD, 5, pool=100)
    true_QK, best_QK = exact.search(rows_ND, queries_QD, 5)
    assert np.mean([len(set(a) & set(b)) for a, b in zip(found_QK.tolist(), true_QK.tolist(), strict=True)]) > 4.7
    assert (found_QK[:, 0] == true_QK[:, 0]).mean() > 0.95
    same = found_QK == true_QK
    np.testing.assert_allclose(scores_QK[same], best_QK[same], rtol=1e-4, atol=1e-5)
