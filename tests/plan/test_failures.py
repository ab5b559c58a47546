"""Goodput under failures: the analytic expressions against a played process, known rules and a published run."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moesaic.errors import UserError
from moesaic.plan.failures.goodput import (
    FailureModel,
    Redundancy,
    best_interval,
    daly_interval,
    goodput,
    node_mtbf_seconds,
    observed_node_mtbf_seconds,
    young_interval,
)
from moesaic.plan.failures.simulate import simulate_failures

HOUR, DAY = 3600.0, 86400.0
EXACT = {
    "checkpoints that stop training": FailureModel(256, 100 * DAY, 60.0),
    "checkpoints in the background": FailureModel(256, 100 * DAY, 5.0, 240.0),
    "often, with long restarts": FailureModel(100, 5 * DAY, 20.0, 100.0, 120.0, 900.0),
    "failures within minutes": FailureModel(1000, 10 * DAY, 10.0, 30.0, 10.0, 200.0),
}
AVERAGED = {
    "spares that mostly suffice": FailureModel(512, 200 * DAY, 30.0, spares=3, repair_seconds=6 * HOUR),
    "waiting for repairs": FailureModel(512, 200 * DAY, 30.0, spares=0, repair_seconds=6 * HOUR),
    "elastic": FailureModel(512, 200 * DAY, 30.0, spares=0, repair_seconds=6 * HOUR, elastic=True, replica_nodes=16),
    "redundant": FailureModel(64, 4 * DAY, 30.0, restart_seconds=600.0, redundancy=Redundancy()),
}


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("interval", [300.0, 2400.0])
def test_renewal_is_what_is_played(name: str, interval: float) -> None:
    played = simulate_failures(EXACT[name], interval, days=100, runs=16, seed=3)
    assert played.standard_error < 0.01
    expected = goodput(EXACT[name], interval)
    assert abs(played.goodput - expected.goodput) < 4 * played.standard_error + 1e-4
    assert played.failures / 1600 == pytest.approx(expected.failures_per_day, rel=0.05)


@pytest.mark.parametrize("name", AVERAGED)
def test_averages_are_near_what_is_played(name: str) -> None:
    """Here the analytic answer is an approximation: repairs and restarts are not quite independent."""
    played = simulate_failures(AVERAGED[name], 900.0, days=400, runs=16, seed=5)
    assert abs(played.goodput - goodput(AVERAGED[name], 900.0).goodput) < 4 * played.standard_error + 0.005


def test_llama_3() -> None:
    """16,384 H100s, 466 interruptions in 54 days, more than 90 % effective training time."""
    mtbf = observed_node_mtbf_seconds(466, 54.0, 16384 // 8)
    assert mtbf == pytest.approx(node_mtbf_seconds(45_566, 8), rel=1e-3)
    # A snapshot to host memory that is written out beside training, and a restart within minutes.
    found = best_interval(FailureModel(2048, mtbf, 5.0, 60.0, 60.0, 300.0))
    assert found.failures_per_day == pytest.approx(466 / 54, rel=0.02)
    assert 0.90 < found.goodput < 0.95
    # With checkpoints that stop training for two minutes and restarts of a quarter of an hour it is out of reach.
    assert best_interval(FailureModel(2048, mtbf, 120.0, 0.0, 60.0, 900.0)).goodput < 0.85


def test_rules_for_the_interval() -> None:
    model = FailureModel(2048, 237 * DAY, 60.0)
    best = best_interval(model)
    assert daly_interval(model) == pytest.approx(best.interval_seconds, rel=0.01)
    assert young_interval(model) == pytest.approx(best.interval_seconds, rel=0.1)
    for factor in (0.5, 0.9, 1.1, 2.0):
        assert goodput(model, factor * best.interval_seconds).goodput < best.goodput
    assert young_interval(model) == pytest.approx(math.sqrt(2 * 60.0 * 237 * DAY / 2048))
    # A checkpoint that costs nothing is taken as often as it can be written.
    assert best_interval(FailureModel(8, DAY, 0.0, 90.0)).interval_seconds == 90.0


def test_redundancy_pays_where_failures_are_frequent() -> None:
    """Bamboo's case: preempted nodes every few minutes; on quiet machines its overhead is not worth it."""
    for mtbf, better in ((0.5 * DAY, True), (400 * DAY, False)):
        plain = FailureModel(64, mtbf, 30.0, restart_seconds=600.0)
        redundant = replace(plain, redundancy=Redundancy())
        assert (best_interval(redundant).goodput > best_interval(plain).goodput) == better


def test_fewer_nodes_are_better_than_none() -> None:
    waits = FailureModel(512, 200 * DAY, 30.0, spares=0, repair_seconds=6 * HOUR)
    shrinks = replace(waits, elastic=True, replica_nodes=16)
    spare = replace(waits, spares=4)
    results = [goodput(model, 900.0).goodput for model in (waits, shrinks, spare)]
    assert results == sorted(results) and results[0] < results[1] - 0.1


models = st.builds(
    FailureModel,
    nodes=st.integers(1, 4096),
    node_mtbf_seconds=st.floats(DAY, 1000 * DAY),
    checkpoint_seconds=st.floats(0.1, 300),
    write_seconds=st.floats(0, 300),
    detection_seconds=st.floats(0, 600),
    restart_seconds=st.floats(0, 1800),
    spares=st.none() | st.integers(0, 10),
    repair_seconds=st.floats(600, 2 * DAY),
    redundancy=st.none() | st.just(Redundancy()),
)


@settings(deadline=None, max_examples=150)
@given(models, st.booleans(), st.floats(300, 20_000))
def test_shares_add_up_and_reliable_machines_do_more(model: FailureModel, elastic: bool, interval: float) -> None:
    model = replace(model, elastic=elastic and model.spares is not None)
    found = goodput(model, interval)
    shares = [found.goodput, found.checkpoints, found.lost_work, found.downtime, found.waiting, found.redundancy]
    assert sum(shares) == pytest.approx(1.0) and min(shares) >= -1e-9
    better = goodput(replace(model, node_mtbf_seconds=2 * model.node_mtbf_seconds), interval)
    assert better.goodput >= found.goodput - 1e-9


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"nodes": 0}, "nodes: is 0"),
        ({"node_mtbf_seconds": 0.0}, "mean time between failures"),
        ({"node_mtbf_seconds": math.inf}, "mean time between failures"),
        ({"restart_seconds": -1.0}, "restart_seconds: is -1.0"),
        ({"spares": -1}, "spares: is -1"),
        ({"spares": 1}, "repair_seconds: is 0 with a limited number"),
        ({"elastic": True}, "elastic: needs a number of spares"),
        ({"replica_nodes": 9}, "replica_nodes: is 9 of 8"),
    ],
)
def test_nonsense_is_refused(change: dict, problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        FailureModel(**{"nodes": 8, "node_mtbf_seconds": DAY, "checkpoint_seconds": 10.0, **change})


def test_intervals_that_cannot_be() -> None:
    model = FailureModel(8, DAY, 10.0, 600.0)
    with pytest.raises(UserError, match="shorter than the 600 s that writing one takes"):
        goodput(model, 60.0)
    with pytest.raises(UserError, match="is 0.0 seconds"):
        goodput(model, 0.0)
