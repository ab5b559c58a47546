"""What-if analysis: the graph behind a trace, contributions, and the forms a trace may have.

Whether causes are found is in `test_straggler_causes.py`.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moesaic.errors import UserError
from moesaic.plan.timeline.events import simulate
from moesaic.plan.timeline.pipeline import Pipeline
from moesaic.plan.timeline.trace import Record, Trace, read_trace, write_chrome, write_csv
from moesaic.plan.whatif.analysis import analyse
from moesaic.plan.whatif.trace_graph import trace_graph
from tests.plan.recorded_run import Job, Plant, case, record

JOB = Job(
    seed=1,
    pp=4,
    dp=3,
    chunks=2,
    micro_batches=8,
    steps=3,
    noise=0.03,
    tails="normal",
    skew=0.0,
    backward=2.0,
    send=0.05,
    collective=1.0,
    blocking=False,
    names=True,
)


@pytest.mark.parametrize("change", [{}, {"blocking": True}, {"names": False}, {"chunks": 1}, {"dp": 1, "names": False}])
def test_a_healthy_run_has_nothing_to_heal(change: dict) -> None:
    trace, seconds = record(replace(JOB, **change), Plant())
    result = analyse(trace)
    assert result.actual_seconds == pytest.approx(seconds)
    assert all(cause.saved_share < 0.03 for cause in result.causes)
    assert 1.0 < result.slowdown < 1.1


@pytest.mark.parametrize("change", [{}, {"blocking": True}, {"names": False}, {"chunks": 1}])
def test_the_graph_replays_another_run(change: dict) -> None:
    """The graph of a run with everything wrong, given the times of one with nothing wrong, takes as long as that."""
    job = replace(JOB, **change)
    lengths = np.random.default_rng(0).uniform(0.5, 2.0, (job.steps, job.dp, job.micro_batches))
    wrong = Plant(
        worker={(1, 0): 1.7, (3, 2): 1.3},
        pauses={(1, 2, 1, 3, 0): 5.0},
        batch=lengths,
        links={frozenset({job.rank(0, 1), job.rank(1, 1)}): 30.0},
        groups={3: 5.0},
    )
    slow, fast = (trace_graph(record(job, plant)[0]) for plant in (wrong, Plant()))

    def key(one: Record) -> tuple:
        return (one.rank, one.kind, one.step, one.micro_batch, one.chunk)

    places = {key(one): number for number, one in enumerate(fast.records)}
    order = [places[key(one)] for one in slow.records]
    seconds = slow.replay([(fast.work[order], fast.delay[order])])[0]
    assert seconds == pytest.approx(record(job, Plant())[1], rel=1e-9)


@pytest.mark.parametrize(
    ("schedule", "chunks", "overlap"),
    [("gpipe", 1, True), ("1f1b", 1, True), ("1f1b", 1, False), ("interleaved", 3, True), ("zb-h1", 1, False)],
)
def test_simulated_steps_replay_exactly(schedule: str, chunks: int, overlap: bool) -> None:
    random = np.random.default_rng(7)
    forward = random.uniform(0.5, 1.5, (4, chunks))
    scale = random.uniform(0.5, 1.5, 8)
    timeline = simulate(
        Pipeline(forward, 2 * forward, 0.2, 8, schedule, overlap, micro_batch_scale=scale.tolist()).operations()
    )
    run = trace_graph(Trace.of_timeline(timeline))
    assert run.delay.max() < 1e-9
    assert run.replay([(run.work, run.delay), (run.work / 2, run.delay)]) == pytest.approx(
        [timeline.makespan, timeline.makespan / 2]
    )


def test_by_hand() -> None:
    """Two replicas of one stage; one takes 3 s where the other takes 1, and both wait for the gradients' all-reduce."""
    records = [
        Record(0, "forward", 0.0, 1.0, micro_batch=0),
        Record(1, "forward", 0.0, 3.0, micro_batch=0),
        Record(0, "all_reduce", 1.0, 3.5),
        Record(1, "all_reduce", 3.0, 3.5),
        Record(0, "optimizer", 3.5, 4.0),
        Record(1, "optimizer", 3.5, 4.0),
    ]
    result = analyse(Trace.of(records))
    assert (result.actual_seconds, result.ideal_seconds) == (4.0, 3.0)
    assert result.slowdown == pytest.approx(4 / 3)
    assert result.wasted_gpu_hours == pytest.approx(2 * 1.0 / 3600)
    saved = {one.place: (one.saved_seconds, one.slowdown_alone) for one in result.contributions}
    assert saved["rank 1 (stage 0, dp 1, tp 0)"] == pytest.approx((1.0, 4 / 3))
    assert saved["rank 0 (stage 0, dp 0, tp 0)"] == pytest.approx((0.0, 1.0))
    assert saved["forward"] == pytest.approx((1.0, 4 / 3))
    assert saved["all_reduce"] == pytest.approx((0.0, 1.0))
    median = analyse(Trace.of(records), ideal="median")
    assert median.ideal_seconds == pytest.approx(3.0)


def test_both_forms_of_a_trace_give_the_same_answer(tmp_path: Path) -> None:
    trace, _ = record(JOB, Plant(worker={(2, 1): 1.3}))
    write_csv(trace, tmp_path / "trace.csv")
    write_chrome(trace, tmp_path / "trace.json")
    answers = [analyse(one) for one in (trace, read_trace(tmp_path / "trace.csv"), read_trace(tmp_path / "trace.json"))]
    for answer in answers:
        first = answer.causes[0]
        assert (first.cause, first.place["rank"]) == ("slow worker", JOB.rank(2, 1))
        assert first.saved_seconds == pytest.approx(answers[0].causes[0].saved_seconds, rel=1e-6)
        assert json.loads(json.dumps(answer.as_dict()))["causes"][0]["cause"] == "slow worker"
        assert answer.table()[0]["what"] == "slow worker" and "rank 6" in answer.table()[0]["where"]


def test_lengths_explain_micro_batches() -> None:
    """Where lengths were recorded the analysis says how much of the differences they account for."""
    planted = next(one for one in map(case, range(2, 200, 5)) if one.job.names)
    assert planted.cause == "sequence-length imbalance"
    first = analyse(planted.trace).causes[0]
    assert "explained by tokens and their squares" in first.evidence
    share = int(first.evidence.rsplit("%", 1)[0].rsplit(" ", 1)[1])
    assert share > 80


def test_what_was_not_recorded_costs_nothing() -> None:
    """Steps 1 and 5 of a run: the time between them belongs to no step."""
    trace, _ = record(replace(JOB, steps=1), Plant())
    length = max(one.end for one in trace.records)
    later = [one._replace(step=5, start=one.start + 1000, end=one.end + 1000) for one in trace.records]
    both = Trace.of([one._replace(step=1) for one in trace.records] + later)
    result = analyse(both)
    assert result.steps == 2
    assert result.actual_seconds == pytest.approx(2 * length)


def test_batched_sends_and_receives_do_not_lock_each_other() -> None:
    """Two ranks that each issue a send and a receive at once, on one stream, as Megatron's batched messages are."""
    records = []
    for rank, (one, other) in enumerate([("send_forward", "recv_backward"), ("send_backward", "recv_forward")]):
        kind = "forward" if rank == 0 else "backward"
        batch = 1 if rank == 0 else 0
        records.append(Record(rank, kind, 0.0, 1.0, 0, rank, batch, stream="compute"))
        for name, number in ((one, batch), (other, 1 - batch)):
            records.append(Record(rank, name, 1.0, 1.5, 0, rank, number, stream="nccl"))
    records.append(Record(0, "backward", 1.5, 3.0, 0, 0, 0, stream="compute"))
    records.append(Record(1, "forward", 1.5, 3.0, 0, 1, 1, stream="compute"))
    result = analyse(Trace.of(records))
    assert result.actual_seconds == pytest.approx(3.0) and result.replay_error < 1e-9


@pytest.mark.parametrize(
    ("records", "problem"),
    [
        ([], "holds no operations"),
        (
            [Record(0, "forward", 0.0, 1.0, 0, 0, 3), Record(0, "forward", 1.0, 2.0, 0, 0, 3)],
            "the forward of micro-batch 3, chunk 0 is recorded twice",
        ),
        ([Record(0, "forward", 0.0, 1.0, stage=0), Record(1, "forward", 0.0, 1.0)], "rank 1: has no stage"),
        ([Record(0, "forward", 0.0, 1.0, stage=0), Record(0, "forward", 1.0, 2.0, stage=1)], "stage 0 and stage 1"),
    ],
)
def test_traces_that_cannot_be(records: list[Record], problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        analyse(Trace.of(records))


@pytest.mark.parametrize("left_out", ["nothing", "receives", "sends", "both", "places", "all but one step"])
def test_recorders_that_know_less(left_out: str) -> None:
    """A slow worker is found, and healed as before, when only a part of the run was recorded."""
    plant = Plant(worker={(2, 1): 1.3})
    trace, _ = record(JOB, plant)
    records = list(trace.records)
    if left_out in ("receives", "both"):
        records = [one for one in records if not one.kind.startswith("recv")]
    if left_out in ("sends", "both"):
        records = [one for one in records if not one.kind.startswith("send")]
    if left_out == "places":
        records = [one._replace(micro_batch=None, dp=None, stream=None) for one in records]
    if left_out == "all but one step":
        records = [one for one in records if one.step == 1]
    result = analyse(Trace.of(records))
    first = result.causes[0]
    assert (first.cause, first.place) == ("slow worker", {"rank": JOB.rank(2, 1), "stage": 2, "dp": 1})
    healthy = record(JOB, Plant())[1] / record(JOB, plant)[1]
    assert first.healed_seconds / result.actual_seconds == pytest.approx(healthy, rel=0.03)


def test_two_causes_are_both_named() -> None:
    plant = Plant(worker={(1, 2): 1.4}, groups={0: 12.0})
    result = analyse(record(JOB, plant)[0])
    assert {one.cause for one in result.causes[:2]} == {"slow worker", "slow link"}
    assert {"rank": JOB.rank(1, 2), "stage": 1, "dp": 2} in [one.place for one in result.causes[:2]]
