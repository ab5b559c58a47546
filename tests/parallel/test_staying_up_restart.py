"""Ranks that are killed and stopped for real: torchrun starts the run again, and it ends with the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest

from moesaic.plan.timeline.trace import read_trace
from moesaic.plan.whatif.analysis import analyse
from moesaic.train.report.metrics import read_events, read_metrics
from tests.parallel.dying import SLOW_SECONDS
from tests.parallel.launched import assert_same, prepared, train

EXPERTS = "parallel.ep=2"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return prepared(tmp_path_factory.mktemp("prepared"))


@pytest.fixture(scope="module")
def undisturbed(data: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("undisturbed") / "run"
    assert train(out, data, EXPERTS).returncode == 0
    return out


def events(out: Path, kind: str) -> list[dict]:
    return [event for event in read_events(out) if event["kind"] == kind]


def assert_same_run(out: Path, undisturbed: Path) -> None:
    assert_same(out, undisturbed)
    losses = [[(line["step"], line["loss"]) for line in read_metrics(of)] for of in (out, undisturbed)]
    assert losses[0] == losses[1]


def test_killed_in_dispatch_in_backward_and_in_a_save(data: str, undisturbed: Path, tmp_path: Path) -> None:
    faults = ("1:KILL:dispatch:3", "0:KILL:backward:4", "1:KILL:writing:6")
    done = train(tmp_path / "run", data, EXPERTS, faults=faults)
    assert done.returncode == 0, done.stderr[-3000:]
    recoveries = events(tmp_path / "run", "recovery")
    assert [event["restart"] for event in recoveries] == [1, 2, 3]
    assert all(event["seconds"] > 0 for event in recoveries)
    assert recoveries[0]["step"] in (0, 2) and recoveries[2]["step"] == 4  # the first was perhaps not on disk yet
    assert_same_run(tmp_path / "run", undisturbed)


def test_a_stopped_rank_is_named_and_the_run_goes_on(data: str, undisturbed: Path, tmp_path: Path) -> None:
    timeout = 30.0
    done = train(tmp_path / "run", data, EXPERTS, f"parallel.timeout={timeout}", faults=["1:STOP:backward:5"])
    assert done.returncode == 0, done.stderr[-3000:]
    (stuck,) = events(tmp_path / "run", "stuck")
    # Its last word may be a moment old when it is stopped, and a step takes no longer than that.
    assert stuck["rank"] == 1 and stuck["step"] in (4, 5)
    assert stuck["seconds"] <= timeout
    assert stuck["text"] in done.stderr and "its process is stopped" in stuck["text"]
    assert_same_run(tmp_path / "run", undisturbed)


def test_with_copies_in_memory_no_step_is_lost(data: str, undisturbed: Path, tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    settings = EXPERTS, "parallel.redundancy=true", f"parallel.redundancy_folder={memory}", "train.save_every=100"
    faults = ("1:KILL:backward:3", "0:GONE:forward:6")
    done = train(tmp_path / "run", data, *settings, faults=faults)
    assert done.returncode == 0, done.stderr[-3000:]
    recoveries = events(tmp_path / "run", "recovery")
    # There is no checkpoint before the last step: all comes from memory, the second time from the neighbour's, who may
    # have had the last step's copy still on its way.
    first, second = ((event["step"], event["lost"]) for event in recoveries)
    assert first == (2, 0) and second in [(5, 0), (4, 1)]
    assert events(tmp_path / "run", "copy")[0]["bytes"] > 0
    assert not any(memory.iterdir())  # nothing is left behind
    assert_same_run(tmp_path / "run", undisturbed)


def test_fewer_ranks_go_on(data: str, undisturbed: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    ended = train(out, data, EXPERTS, ranks=4, faults=["3:KILL:forward:4"], restarts=0)
    assert ended.returncode != 0
    assert not (out / "model.safetensors").exists() or read_metrics(out)[-1]["step"] < 6
    done = train(out, data, EXPERTS, ranks=2)
    assert done.returncode == 0, done.stderr[-3000:]
    assert events(out, "recovery")[-1]["step"] in (0, 2)
    wanted = {line["step"]: line["loss"] for line in read_metrics(undisturbed)}
    for line in read_metrics(out):
        assert line["loss"] == pytest.approx(wanted[line["step"]], rel=1e-5)


def test_a_slow_rank_and_one_with_bad_numbers_are_named(data: str, tmp_path: Path) -> None:
    out, settings = tmp_path / "run", (EXPERTS, "parallel.trace=true", "parallel.trace_every=3")
    done = train(out, data, *settings, faults=["1:SLOW:forward:0+1:NAN:-:2"], restarts=0)
    assert done.returncode == 0, done.stderr[-3000:]
    (bad,) = events(out, "nonfinite")
    assert (bad["of"], bad["rank"], bad["parameter"]) == (2, 1, "layers.1.ffn.down_EDF")
    assert [line["skipped"] for line in read_metrics(out)] == [False, True, False, False, False, False]
    first, second = events(out, "stragglers")
    for report in (first, second):
        assert (report["ranks"][0], report["operations"][0]) == (1, "forward")
        assert report["cost"][0] == pytest.approx(SLOW_SECONDS, rel=0.5)
    assert any(name.startswith("all_to_all") and flow["bytes"] > 0 for name, flow in second["flows"].items())
    trace = read_trace(out / "trace.json")
    assert trace.ranks == [0, 1] and trace.steps == [1, 2, 3, 4, 5, 6]
    assert {"data", "forward", "backward", "all_reduce", "optimizer"} <= {record.kind for record in trace.records}
    found = analyse(trace)
    assert found.ranks == 2 and found.steps == 6 and found.replay_error < 0.05
