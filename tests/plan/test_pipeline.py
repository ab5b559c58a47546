"""Pipeline schedules against the textbooks' bubbles, and the fast recurrence against the event simulation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moesaic.errors import UserError
from moesaic.plan.timeline import pipeline
from moesaic.plan.timeline.events import Operation, simulate
from moesaic.plan.timeline.pipeline import SCHEDULES, Pipeline


@pytest.mark.parametrize(("ranks", "micro_batches"), [(1, 3), (2, 2), (4, 4), (4, 9), (7, 20)])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_bubble_of_gpipe_and_1f1b(schedule: str, ranks: int, micro_batches: int) -> None:
    time = Pipeline([1.0] * ranks, [2.0] * ranks, 0.0, micro_batches, schedule).time()
    assert time.bubble_over_compute == pytest.approx((ranks - 1) / micro_batches)
    assert time.bubble == pytest.approx((ranks - 1) / (micro_batches + ranks - 1))


@pytest.mark.parametrize(("ranks", "chunks", "groups"), [(2, 2, 1), (2, 3, 4), (4, 2, 1), (4, 6, 3), (8, 2, 2)])
def test_bubble_of_interleaved_1f1b(ranks: int, chunks: int, groups: int) -> None:
    times = np.full((ranks, chunks), 1.0)
    time = Pipeline(times, 2 * times, 0.0, groups * ranks, "interleaved").time()
    assert time.bubble_over_compute == pytest.approx((ranks - 1) / (chunks * groups * ranks))


@pytest.mark.parametrize(("ranks", "micro_batches"), [(1, 4), (2, 4), (4, 8), (8, 24)])
@pytest.mark.parametrize(("forward", "backward", "weight"), [(1.0, 1.0, 1.0), (1.0, 1.25, 0.75), (1.0, 1.5, 1.0)])
def test_bubble_of_zero_bubble_h1(
    ranks: int, micro_batches: int, forward: float, backward: float, weight: float
) -> None:
    time = Pipeline(
        [forward] * ranks,
        [backward + weight] * ranks,
        0.0,
        micro_batches,
        "zb-h1",
        weight_seconds=[weight] * ranks,
    ).time()
    idle = time.makespan - micro_batches * (forward + backward + weight)
    assert idle == pytest.approx((ranks - 1) * (forward + backward - weight))


def activations(operations: list[Operation], rank: int) -> int:
    """The most micro-batches (of a chunk) a rank holds activations of, with what last needs them freeing them."""
    last = "weight_gradient" if any(operation.kind == "weight_gradient" for operation in operations) else "backward"
    held = most = 0
    for operation in operations:
        if operation.rank == rank:
            held += {"forward": 1, last: -1}.get(operation.kind, 0)
            most = max(most, held)
    return most


def test_activations_held() -> None:
    """1F1B holds at most as many as ranks are left; ZB-H1 no more than 1F1B's first rank; GPipe all of them."""
    arguments = ([1.0] * 4, [2.0] * 4, 0.1, 12)
    for rank in range(4):
        assert activations(Pipeline(*arguments, "gpipe").operations(), rank) == 12
        assert activations(Pipeline(*arguments, "1f1b").operations(), rank) == 4 - rank
        assert activations(Pipeline(*arguments, "zb-h1").operations(), rank) <= 4


@st.composite
def steps(draw: st.DrawFn) -> dict:
    schedule = draw(st.sampled_from(SCHEDULES))
    interleaved = schedule == "interleaved"
    ranks = draw(st.integers(2 if interleaved else 1, 5))
    chunks = draw(st.integers(1, 3)) if interleaved else 1
    micro_batches = draw(st.integers(1, 3)) * ranks if interleaved else draw(st.integers(1, 12))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    return {
        "forward_seconds": random.random((ranks, chunks)),
        "backward_seconds": 2 * random.random((ranks, chunks)),
        "send_seconds": random.random(ranks) * draw(st.sampled_from([0.0, 0.1, 3.0])),
        "micro_batches": micro_batches,
        "schedule": schedule,
        "overlap_send": draw(st.booleans()),
        "micro_batch_scale": random.random(micro_batches) if draw(st.booleans()) else None,
    }


@pytest.fixture(params=["one by one", "by wave"])
def recurrence(request: pytest.FixtureRequest) -> Iterator[None]:
    """Both forms of the recurrence, whatever the number of ranks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "MANY", 10**9 if request.param == "one by one" else 0)
        pipeline._order.cache_clear()
        yield
    pipeline._order.cache_clear()


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps())
def test_the_recurrence_is_the_simulation(recurrence: None, step: dict) -> None:
    operations = Pipeline(**step).operations()
    timeline = simulate(operations)
    time = Pipeline(**step).time()
    assert time.makespan == pytest.approx(timeline.makespan, rel=1e-9)
    compute = [0.0] * len(time.compute_seconds)
    for operation in operations:
        if not operation.kind.startswith("send"):
            compute[operation.rank] += operation.seconds
    assert time.compute_seconds == pytest.approx(compute, rel=1e-9)


@settings(deadline=None, max_examples=100)
@given(steps())
def test_every_micro_batch_passes_every_virtual_stage_in_order(step: dict) -> None:
    """From dependencies alone: data flows down the virtual stages and gradients back up, whatever the durations."""
    operations = Pipeline(**step).operations()
    ranks, chunks = step["forward_seconds"].shape
    timeline = simulate(operations)
    kinds = ["forward", "backward"] + ["weight_gradient"] * (step["schedule"] == "zb-h1")
    end: dict[tuple, float] = {}
    start: dict[tuple, float] = {}
    sends = Counter(operation.kind for operation in operations if operation.kind.startswith("send"))
    for number, operation in enumerate(operations):
        key = (operation.kind, operation.chunk * ranks + operation.stage, operation.micro_batch)
        assert key not in end
        start[key], end[key] = timeline.starts[number], timeline.ends[number]
    stages = ranks * chunks
    for micro_batch in range(step["micro_batches"]):
        for stage in range(stages):
            assert {(kind, stage, micro_batch) in end for kind in kinds} == {True}
            for before, after in [
                (("forward", stage - 1), ("send_forward", stage - 1)),
                (("send_forward", stage - 1), ("forward", stage)),
                (("send_backward", stage + 1), ("backward", stage)),
                (("forward", stage), ("backward", stage)),
                (("backward", stage), ("weight_gradient", stage)),
            ]:
                if (*before, micro_batch) in end and (*after, micro_batch) in start:
                    assert end[*before, micro_batch] <= start[*after, micro_batch] + 1e-12
    expected = step["micro_batches"] * (stages - 1) if ranks > 1 else 0
    assert sends["send_forward"] == sends["send_backward"] == expected


def test_many_uneven_ranks() -> None:
    random = np.random.default_rng(4)
    forward, sends = random.uniform(0.5, 1.5, (40, 2)), random.uniform(0.0, 0.5, 40)
    arguments = (forward, 2 * forward, sends, 80, "interleaved")
    for overlap in (True, False):
        step = Pipeline(*arguments, overlap)
        assert step.time().makespan == pytest.approx(simulate(step.operations()).makespan, rel=1e-9)


def test_a_large_step_is_counted_by_hand() -> None:
    """pp 64, 512 micro-batches, 6 chunks: the closed form of even stages."""
    times = np.full((64, 6), 0.25)
    time = Pipeline(times, 2 * times, 0.0, 512, "interleaved").time()
    assert time.makespan == pytest.approx((512 * 6 + 63) * 0.75)


def test_a_slow_last_stage_sets_the_pace() -> None:
    step = Pipeline([1.0, 1.0, 1.0, 1.5], [2.0, 2.0, 2.0, 3.0], 0.0, 100)
    assert step.time().makespan == pytest.approx(100 * 4.5 + 3 * 3.0)
    assert step.time().makespan == simulate(step.operations()).makespan


def test_sends_that_overlap_cost_less() -> None:
    arguments = ([1.0] * 4, [2.0] * 4, 0.2, 16)
    hidden, exposed = Pipeline(*arguments, overlap_send=True).time(), Pipeline(*arguments, overlap_send=False).time()
    assert Pipeline([1.0] * 4, [2.0] * 4, 0.0, 16).time().makespan < hidden.makespan < exposed.makespan


def test_two_steps_stand_in_one_list() -> None:
    first = Pipeline([1.0, 1.0], [2.0, 2.0], 0.1, 4).operations(step=0)
    second = Pipeline([1.0, 1.0], [2.0, 2.0], 0.1, 4).operations(step=1, first_id=len(first), ranks=[7, 9])
    together = simulate(first + second)
    assert together.makespan == simulate(first).makespan  # on other ranks, they do not meet
    assert {operation.rank for operation in second} == {7, 9}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"schedule": "1F1B"}, "is unknown. Known are: gpipe"),
        ({"micro_batches": 0}, "is 0"),
        ({"backward_seconds": [1.0]}, "forward_seconds has"),
        ({"forward_seconds": [[1.0], [1.0, 2.0]]}, "other numbers of chunks"),
        ({"forward_seconds": [1.0, -1.0]}, "not a time"),
        ({"send_seconds": [1.0, 1.0, 1.0]}, "3 links for 2 ranks"),
        ({"send_seconds": float("inf")}, "not a time"),
        ({"micro_batch_scale": [1.0]}, "is not 4 factors"),
        ({"schedule": "zb-h1", "weight_seconds": [3.0, 3.0]}, "more than backward"),
        ({"forward_seconds": [[1.0, 1.0]] * 2, "backward_seconds": [[1.0, 1.0]] * 2}, "the times have 2"),
        (
            {
                "forward_seconds": [[1.0, 1.0]] * 2,
                "backward_seconds": [[1.0, 1.0]] * 2,
                "schedule": "interleaved",
                "micro_batches": 5,
            },
            "cannot run 5 micro-batches on 2 ranks",
        ),
    ],
)
def test_nonsense_is_refused(change: dict, problem: str) -> None:
    step = {"forward_seconds": [1.0, 1.0], "backward_seconds": [2.0, 2.0], "send_seconds": 0.1, "micro_batches": 4}
    with pytest.raises(UserError, match=problem):
        Pipeline(**{**step, **change}).time()
