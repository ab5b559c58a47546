"""Traces written and read again, as Chrome JSON and CSV, and the errors of malformed ones; the Gantt chart."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moesaic.errors import UserError
from moesaic.plan.timeline.events import simulate
from moesaic.plan.timeline.gantt import write_gantt
from moesaic.plan.timeline.pipeline import Pipeline
from moesaic.plan.timeline.trace import GROUPS, KINDS, Record, Trace, chrome_trace, read_trace, write_chrome, write_csv

maybe = st.none() | st.integers(0, 99)
records = st.builds(
    lambda start, seconds, **rest: Record(start=start, end=start + seconds, **rest),
    start=st.floats(0, 1e4),
    seconds=st.floats(0, 1e3),
    rank=st.integers(0, 5),
    kind=st.sampled_from(KINDS),
    step=st.integers(0, 3),
    stage=maybe,
    micro_batch=maybe,
    chunk=maybe,
    stream=st.none() | st.sampled_from(["compute", "send, forward", '"7"']),
    dp=maybe,
    tp=maybe,
    group=st.none() | st.sampled_from(GROUPS),
    lengths=st.lists(st.integers(0, 10**6), max_size=3).map(tuple),
)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(records, min_size=1, max_size=12))
def test_both_forms_give_the_trace_back(tmp_path: Path, found: list[Record]) -> None:
    trace = Trace.of(found)
    write_csv(trace, tmp_path / "trace.csv")
    write_chrome(trace, tmp_path / "trace.json")
    assert read_trace(tmp_path / "trace.csv") == trace

    def untimed(one: Trace) -> list[tuple]:
        fields = ("rank", "kind", "step", "stage", "micro_batch", "chunk", "stream", "dp", "tp", "group", "lengths")
        return sorted(tuple(map(repr, (getattr(record, field) for field in fields))) for record in one.records)

    read = read_trace(tmp_path / "trace.json")
    assert untimed(read) == untimed(trace)
    for field in ("start", "end"):
        times = [sorted(getattr(record, field) for record in one.records) for one in (read, trace)]
        np.testing.assert_allclose(times[0], times[1], rtol=1e-9, atol=1e-9)


def test_a_simulation_is_a_trace() -> None:
    timeline = simulate(Pipeline([1.0, 1.0], [2.0, 2.0], 0.1, 3).operations(step=4))
    trace = Trace.of_timeline(timeline)
    assert trace.steps == [4] and trace.ranks == [0, 1] and len(trace.records) == len(timeline.operations)
    events = [event for event in chrome_trace(trace)["traceEvents"] if event["ph"] == "X"]
    first = next(event for event in events if event["pid"] == 1 and event["cat"] == "forward")
    assert first["ts"] == pytest.approx(1.1e6) and first["dur"] == pytest.approx(1e6)
    assert first["args"] == {"step": 4, "stage": 1, "micro_batch": 0, "chunk": 0} and first["tid"] == "compute"


def test_a_recorder_may_leave_out_much(tmp_path: Path) -> None:
    """Bare events of other tools beside ours, pairs of begin and end, compressed, no object around the list."""
    events = [
        {"ph": "M", "name": "process_name", "pid": 0},
        {"ph": "X", "name": "ampere_sgemm", "cat": "kernel", "pid": 0, "tid": 7, "ts": 1, "dur": 2},
        {"ph": "X", "name": "forward-compute 3", "pid": 0, "tid": 7, "ts": 1e6, "dur": 5e5},
        {"ph": "B", "name": "bwd", "pid": 1, "tid": 7, "ts": 2e6, "args": {"step": 1}},
        {"ph": "E", "name": "bwd", "pid": 1, "tid": 7, "ts": 3e6, "args": {"micro_batch": 2, "chunk": -1}},
    ]
    file = tmp_path / "trace.json.gz"
    file.write_bytes(gzip.compress(json.dumps(events).encode()))
    assert read_trace(file).records == (
        Record(0, "forward", 1.0, 1.5, stream="7"),
        Record(1, "backward", 2.0, 3.0, step=1, micro_batch=2, stream="7"),
    )
    short = tmp_path / "short.csv"
    short.write_text("\ufeffkind, rank, start, end\nForward,0,1,2\n\nall-reduce,1,2,3\n")
    assert [record.kind for record in read_trace(short).records] == ["forward", "all_reduce"]


HEADER = "step,rank,stage,kind,micro_batch,chunk,start,end\n"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (HEADER, "holds no operation"),
        ("", "has no column 'rank' and 'kind' and 'start' and 'end'"),
        ("rank,kind,start\n", "line 1: has no column 'end'"),
        ("rank,kind,start,end,microbatch\n", "unknown column 'microbatch'. Did you mean 'micro_batch'?"),
        (HEADER + "0,0,0,forward,0,0,1\n", "line 2: has 7 cells for 8 columns"),
        (HEADER + "0,0,0,forwards,0,0,1,2\n", "line 2: unknown kind 'forwards'. Did you mean 'forward'?"),
        (HEADER + "0,0,0,forward,0,0,1,2\n0,0,0,forward,0,0,3,2\n", "line 3: ends at 2.0, before it starts at 3.0"),
        (HEADER + "0,0,0,forward,0,0,now,2\n", "line 2: 'start' is 'now'"),
        (HEADER + "0,0,0,forward,0,0,nan,2\n", "'start' is 'nan'"),
        (HEADER + "0,0.5,0,forward,0,0,1,2\n", "'rank' is '0.5'"),
        (HEADER + "0,,0,forward,0,0,1,2\n", "has no rank"),
        (HEADER.replace("end", "end,group") + "0,0,0,all_reduce,0,0,1,2,pp\n", "unknown group 'pp'"),
        ('{"traceEvents": [', "is not JSON"),
        ('{"events": []}', "has no list 'traceEvents'"),
        ("[3]", "event 0: is not an object"),
        ('[{"ph": "X", "cat": "forward", "pid": 0, "ts": 1}]', "event 0: 'dur' is None"),
        ('[{"ph": "X", "cat": "forward", "ts": 1, "dur": 1}]', "event 0: has no rank"),
        ('[{"ph": "X", "cat": "forward", "pid": 0, "ts": 1, "dur": -2}]', "before it starts"),
        ('[{"ph": "X", "cat": "forward", "pid": "gpu", "ts": 1, "dur": 1}]', "'rank' is 'gpu'"),
        ('[{"ph": "X", "cat": "forward", "pid": 0, "ts": 1, "dur": 1, "args": 3}]', "'args' is not an object"),
        ('[{"ph": "B", "name": "forward", "pid": 0, "ts": 1}]', "event 0: 'forward' begins and never ends"),
        ('[{"ph": "E", "name": "forward", "pid": 0, "ts": 1}]', "event 0: ends what did not begin"),
        ('[{"ph": "X", "cat": "kernel", "pid": 0, "ts": 1, "dur": 1}]', "holds no operation"),
    ],
)
def test_malformed_files_are_refused(tmp_path: Path, text: str, problem: str) -> None:
    file = tmp_path / "trace"
    file.write_text(text)
    with pytest.raises(UserError) as caught:
        read_trace(file)
    assert problem in str(caught.value) and str(file) in str(caught.value) and caught.value.remedy


def test_a_missing_or_binary_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        read_trace(tmp_path / "none.csv")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="not UTF-8"):
        read_trace(tmp_path / "binary")
    (tmp_path / "cut.json.gz").write_bytes(gzip.compress(b"[]" * 1000)[:20])
    with pytest.raises(UserError, match="cannot be read"):
        read_trace(tmp_path / "cut.json.gz")
    with pytest.raises(UserError, match="cannot be read"):
        read_trace(tmp_path)


@pytest.mark.figures
def test_the_chart_is_a_png_that_shows_every_kind(tmp_path: Path) -> None:
    from matplotlib.colors import to_rgb
    from matplotlib.image import imread

    from moesaic.plan.timeline.gantt import COLOURS

    timeline = simulate(Pipeline([1.0] * 4, [2.0] * 4, 0.2, 8, "zb-h1").operations())
    write_gantt(timeline, tmp_path / "gantt.png", "zb-h1")
    picture = imread(tmp_path / "gantt.png")[..., :3]
    assert picture.shape[0] > 200 and picture.shape[1] > 1000
    pixels = {tuple(pixel) for pixel in np.round(picture.reshape(-1, 3) * 255).astype(int)}
    for kind in ("forward", "backward", "weight gradient", "communication"):
        assert tuple(np.round(np.array(to_rgb(COLOURS[kind])) * 255).astype(int)) in pixels
    assert tuple(np.round(np.array(to_rgb(COLOURS["optimizer"])) * 255).astype(int)) not in pixels
