"""Traces that real ranks write are what the planner reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from moesaic.errors import UserError
from moesaic.parallel.traces import Recorder, merge
from moesaic.plan.timeline.trace import read_trace
from moesaic.plan.whatif.analysis import analyse
from tests.parallel.ranks import on_ranks

WORLD, STEPS, MICRO_BATCHES = 2, 3, 4


def train(rank: int, world: int, folder: Path) -> None:
    """Data-parallel training in small: two ranks, four micro-batches a step, gradients reduced, an update."""
    recorder = Recorder(rank, stage=0, dp=rank)
    weight = torch.zeros(32, 32, requires_grad=True)
    dist.barrier()
    for _ in range(STEPS):
        for micro_batch in range(MICRO_BATCHES):
            with recorder.operation("forward", micro_batch=micro_batch, lengths=[8, 8]):
                loss = (torch.ones(16, 32) @ weight).square().sum() + weight.sum()
            with recorder.operation("backward", micro_batch=micro_batch):
                loss.backward()
        assert weight.grad is not None
        with recorder.operation("all_reduce", group="dp"):
            dist.all_reduce(weight.grad)
        with recorder.operation("optimizer"), torch.no_grad():
            weight -= 1e-3 * weight.grad
            weight.grad = None
        recorder.next_step()
    recorder.write(folder)
    dist.barrier()
    if rank == 0:
        merge(folder, world, folder / "trace.json")


def test_two_ranks_and_the_planner(tmp_path: Path) -> None:
    on_ranks(WORLD, train, tmp_path, tmp_path)
    trace = read_trace(tmp_path / "trace.json")
    assert trace.ranks == [0, 1] and trace.steps == [0, 1, 2]
    assert len(trace.records) == WORLD * STEPS * (2 * MICRO_BATCHES + 2)
    assert min(record.start for record in trace.records) == 0
    for step in trace.steps:
        reduced = [record for record in trace.records if record.kind == "all_reduce" and record.step == step]
        assert min(record.end for record in reduced) >= max(record.start for record in reduced)  # all wait for the last
    forward = next(record for record in trace.records if record.kind == "forward")
    assert forward.lengths == (8, 8) and forward.stage == 0 and forward.dp == 0
    found = analyse(trace)
    assert found.steps == STEPS and found.ranks == WORLD
    span = max(record.end for record in trace.records)
    assert 0 < found.actual_seconds <= span * (1 + 1e-9)


def test_recorded_times_are_the_clocks(tmp_path: Path) -> None:
    """One rank is twice as slow by its own clock: the planner finds it."""
    for rank, seconds in ((0, 1.0), (1, 2.0), (2, 1.0), (3, 1.0)):
        now = [0.0]
        recorder = Recorder(rank, stage=0, dp=rank, clock=lambda now=now: now[0])
        for _ in range(STEPS):
            begin = now[0]
            for micro_batch in range(MICRO_BATCHES):
                for kind, share in (("forward", 1.0), ("backward", 2.0)):
                    with recorder.operation(kind, micro_batch=micro_batch):
                        now[0] += seconds * share
            with recorder.operation("all_reduce", group="dp"):
                now[0] = begin + MICRO_BATCHES * 6.0 + 0.5
            recorder.next_step()
        recorder.write(tmp_path)
    merge(tmp_path, 4, tmp_path / "trace.json")
    found = analyse(read_trace(tmp_path / "trace.json"), "median")
    assert found.causes[0].cause == "slow worker" and found.causes[0].place["rank"] in (1, [1])
    assert found.actual_seconds == pytest.approx(STEPS * 24.5)
    assert found.causes[0].healed_seconds == pytest.approx(STEPS * 12.5, rel=0.03)


def test_a_missing_rank_is_named(tmp_path: Path) -> None:
    Recorder(0).write(tmp_path)
    with pytest.raises(UserError, match="trace-rank00001"):
        merge(tmp_path, 2, tmp_path / "trace.json")
    assert not (tmp_path / "trace.json").exists()
    assert json.loads((tmp_path / "trace-rank00000.json").read_text())["traceEvents"] == []
