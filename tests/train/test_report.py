"""What a run records and shows: whole lines whatever is killed, the same record after a resume, honest numbers."""

from __future__ import annotations

import errno
import importlib
import io
import json
import math
import os
import pty
import random
import select
import shlex
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from moesaic.errors import UserError
from moesaic.model.config import Dense, Experts, GroupedQuery, Layer, ModelConfig, Rope
from moesaic.model.flops import TRAINING, Chunk, forward_flops, training_flops
from moesaic.train.report import report as report_module
from moesaic.train.report.device_reads import DeviceRead
from moesaic.train.report.display import Progress
from moesaic.train.report.expert_load import ExpertLoad, entropy, peak
from moesaic.train.report.metrics import Journal, Metrics, read_events, read_metrics
from moesaic.train.report.mfu import peak_flops
from moesaic.train.report.plot import plot_run, plot_runs, smooth
from moesaic.train.report.report import MAX_IN_FLIGHT, Report, StepRecord, final_summary, summarize
from moesaic.train.report.terminal_plot import loss_plot
from moesaic.units import readable_count, readable_duration
from tests.waiting import PATIENCE

TIMES = ("seconds", "tokens_per_second", "mfu")  # all that may differ between two runs of the same bits
ROOT = Path(__file__).parents[2]


def record(step: int, **values: Any) -> StepRecord:
    """A step that depends on its number alone, with a pyramid of 4 and 6 experts of which one is idle."""
    counts = np.random.default_rng(step).integers(1, 50, 10)
    loads: Any = {1: torch.tensor(counts[:4]), 3: torch.tensor([*counts[4:9], 0])}
    given = {
        "loss": torch.tensor(2.0 + 6.0 / step, dtype=torch.float32),
        "lr": 1e-3,
        "tokens_in_step": 100 + step % 3,
        "seconds": 0.01,
        "loads": loads,
    }
    given |= values
    return StepRecord(step, **({"flops": 1e6 * given["tokens_in_step"]} | given))


def quiet(directory: Path, steps: int = 40, start: int = 0, **options: Any) -> Report:
    settings = {"quiet": True, "tensorboard": False, "full_every": 8, "dead_after": 5}
    return Report(directory, steps, start, **(settings | options))


def timeless(line: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in line.items() if key not in TIMES}


# -- the file, and what may happen to it


def test_a_line_has_what_scripts_rely_on(tmp_path: Path) -> None:
    report = quiet(tmp_path, peak_flops=4e9)
    report.step(record(1, tokens_in_step=1000, seconds=0.5, grad_norm=torch.tensor(1.5), parts={"loss/mtp": 3.25}))
    report.step(record(2, tokens_in_step=500, seconds=0.5, skipped=torch.tensor(True), loss=torch.tensor(math.nan)))
    report.close(plot=False)

    first, second = (json.loads(text) for text in (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert first["step"] == 1 and first["loss"] == 8.0 and first["lr"] == 1e-3
    assert first["tokens"] == 1000 and first["tokens_per_second"] == 2000.0
    assert first["mfu"] == 0.5  # 2000 tokens/s * 1 MFLOP = 2 GFLOP/s, of 4
    assert first["grad_norm"] == 1.5 and first["loss/mtp"] == 3.25 and first["skipped"] is False
    assert set(first["expert_load"]) >= {"max", "entropy", "dead"}
    assert second["tokens"] == 1500 and second["skipped"] is True
    assert second["loss"] is None  # JSON has no nan


def test_the_loss_keeps_every_bit(tmp_path: Path) -> None:
    losses = torch.rand(20) * 10
    report = quiet(tmp_path)
    for step, loss in enumerate(losses, start=1):
        report.step(record(step, loss=loss))
    report.close(plot=False)
    assert torch.equal(torch.tensor([line["loss"] for line in read_metrics(tmp_path)]), losses)


@pytest.mark.parametrize("torn", [b'{"step": 4, "lo', b'{"step": 4, "loss": 1', b"{", b"\x00\x00\x00", b"\xff"])
def test_a_torn_last_line_is_left_out_and_then_removed(tmp_path: Path, torn: bytes) -> None:
    file = tmp_path / "metrics.jsonl"
    whole = b"".join(b'{"step": %d, "loss": 1.0}\n' % step for step in (1, 2, 3))
    file.write_bytes(whole + torn)
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2, 3]
    metrics = Metrics(tmp_path)
    metrics.write({"step": 4, "loss": 2.0})
    assert file.read_bytes() == whole + b'{"step": 4, "loss": 2.0}\n'


def test_a_broken_line_in_the_middle_is_an_error_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n{"ste\n{"step": 3}\n')
    with pytest.raises(UserError, match=r"metrics.jsonl:2: is not a line of metrics"):
        read_metrics(tmp_path)
    Metrics(tmp_path).resume(3)  # the run itself goes on
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 3]


def test_no_metrics_is_an_error_a_user_can_read(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="metrics.jsonl: no such file"):
        read_metrics(tmp_path / "nothing")
    (tmp_path / "metrics.jsonl").touch()
    assert read_metrics(tmp_path) == []
    with pytest.raises(UserError, match="no metrics yet"):
        plot_run(tmp_path)


@settings(max_examples=50)
@given(steps=st.lists(st.integers(1, 12), max_size=30), cut=st.integers(0, 13), torn=st.booleans())
def test_resume_keeps_the_last_line_of_each_step_up_to_it(
    tmp_path_factory: pytest.TempPathFactory, steps: list[int], cut: int, torn: bool
) -> None:
    directory = tmp_path_factory.mktemp("run")
    text = "".join(json.dumps({"step": step, "line": place}) + "\n" for place, step in enumerate(steps))
    (directory / "metrics.jsonl").write_text(text + ('{"step": 5, "li' if torn else ""))
    last = {step: place for place, step in enumerate(steps)}
    assert read_metrics(directory) == [{"step": step, "line": last[step]} for step in sorted(last)]

    metrics = Metrics(directory)
    dropped = metrics.resume(cut)
    kept = [{"step": step, "line": last[step]} for step in sorted(last) if step <= cut]
    assert [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()] == kept
    assert dropped == [{"step": step, "line": last[step]} for step in sorted(last) if step > cut]
    assert metrics.last() == (kept[-1] if kept else None)
    assert os.listdir(directory) == ["metrics.jsonl"]


def test_last_finds_a_line_longer_than_a_block(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path)
    assert metrics.last() is None
    for step in (1, 2, 3):
        line = {"step": step, "long": "x" * 200_000}
        metrics.write(line)
        assert metrics.last() == line


WRITER = """
import json, os, sys
from pathlib import Path
from moesaic.train.report.metrics import Metrics
directory, end = Path(sys.argv[1]), int(sys.argv[2])
saved = directory / "saved"
start = int(saved.read_text()) if saved.exists() else 0
metrics = Metrics(directory)
metrics.resume(start)
print("ready", flush=True)
for step in range(start + 1, end + 1):
    metrics.write({"step": step, "loss": 1 / step, "filler": [step] * 3000})
    if step % 20 == 0:
        metrics.sync()
        (directory / "fresh").write_text(str(step))
        os.replace(directory / "fresh", saved)
"""

# Resumes once for every line of code that this takes, each time in a process that is killed as it comes to the line:
# every moment has its turn, on a machine that is busy as on one that is not.
CUTTER = """
import os, signal, sys
from pathlib import Path
from moesaic.train.report import metrics
directory = Path(sys.argv[1])
lines = [metrics.encode({"step": step, "filler": [step] * 300}) for step in range(1, 601)]

def resume(kill_at):
    seen = []
    def trace(frame, event, argument):
        if frame.f_code.co_filename != metrics.__file__:
            return None
        if event == "line" and frame.f_lineno not in seen:
            seen.append(frame.f_lineno)
            if len(seen) - 1 == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace
    journal = metrics.Metrics(directory)
    sys.settrace(trace)
    journal.resume(300)
    sys.settrace(None)

moment, status = 0, signal.SIGKILL
while status == signal.SIGKILL:
    (directory / "metrics.jsonl").write_bytes(b"".join(lines))
    child = os.fork()
    if not child:
        resume(moment)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    found = [line["step"] for line in metrics.read_metrics(directory)]
    print(found == list(range(1, len(found) + 1)), len(found), status, flush=True)
    moment += 1
"""


def start(program: str, *arguments: object, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, **options)


def kill(process: subprocess.Popen[str], due: Callable[[], bool]) -> None:
    """At a random moment after it is due, so that a busy machine makes the test slower and not emptier."""
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    while not due():
        time.sleep(0.0002)
    time.sleep(random.uniform(0.0, 0.003))
    process.send_signal(signal.SIGKILL)
    process.communicate()


def test_killed_at_any_moment_and_resumed_it_is_the_same_file(tmp_path: Path) -> None:
    killed, straight = tmp_path / "killed", tmp_path / "straight"
    reached, file = [], killed / "metrics.jsonl"
    for _ in range(8):
        process = start(WRITER, killed, 10**9)
        begin = int((killed / "saved").read_text()) if (killed / "saved").exists() else 0
        enough = begin * 15_000 + random.randint(0, 40 * 15_000)  # bytes; a line has about as many
        kill(process, lambda enough=enough: file.stat().st_size >= enough)  # type: ignore[misc]
        lines = read_metrics(killed)
        reached.append(len(lines))
        saved = int((killed / "saved").read_text()) if (killed / "saved").exists() else 0
        assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
        assert len(lines) >= saved
        assert all(line["loss"] == 1 / line["step"] and line["filler"] == [line["step"]] * 3000 for line in lines)
    assert len(set(reached)) > 4 and max(reached) > 20, f"killed too early to show anything: {reached}"
    end = saved + 30
    for directory in (killed, straight):
        start(WRITER, directory, end).communicate()
    assert (killed / "metrics.jsonl").read_bytes() == (straight / "metrics.jsonl").read_bytes()
    assert len(read_metrics(killed)) == end


def test_killed_while_resuming_it_is_the_old_file_or_the_new(tmp_path: Path) -> None:
    out, _ = start(CUTTER, tmp_path).communicate(timeout=PATIENCE)
    found = [tuple(line.split()) for line in out.splitlines()]
    *killed, whole = found
    assert {in_order for in_order, _, _ in found} == {"True"}
    assert whole == ("True", "300", "0") and {status for _, _, status in killed} == {str(int(signal.SIGKILL))}
    lengths = [int(length) for _, length, _ in killed]
    assert lengths == sorted(lengths, reverse=True) and set(lengths) == {600, 300}  # old, and from one moment on new
    assert len(lengths) > 20


def test_a_full_disk_is_an_error_that_names_the_file_and_leaves_whole_lines(tmp_path: Path) -> None:
    # A limit on the file's size: like a full disk, it takes part of a line and then refuses.
    program = """
import resource, signal, sys
from pathlib import Path
from moesaic.train.report.metrics import Metrics
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
metrics = Metrics(Path(sys.argv[1]))
try:
    for step in range(1, 100):
        metrics.write({"step": step, "loss": 1.0})
except OSError as error:
    print(error.errno, error.filename)
"""
    out, _ = start(program, tmp_path).communicate()
    assert out.split() == [str(errno.EFBIG), str(tmp_path / "metrics.jsonl")]
    text = (tmp_path / "metrics.jsonl").read_text()
    assert text.endswith("}\n") and 900 < len(text) <= 1000


# -- expert load


def test_load_of_a_layer_by_hand() -> None:
    assert peak(np.array([30, 10, 10, 10])) == 2.0
    assert entropy(np.array([5, 5, 5, 5])) == pytest.approx(1.0)
    assert entropy(np.array([20, 0, 0, 0])) == 0.0 and math.copysign(1, entropy(np.array([20, 0, 0, 0])) or 0.0) == 1
    assert entropy(np.array([10, 10, 0, 0])) == pytest.approx(0.5)  # 1 bit of 2
    assert entropy(np.array([7])) == 1.0
    assert peak(np.zeros(4, int)) is None and entropy(np.zeros(4, int)) is None


def test_a_pyramid_is_summed_up_each_step_and_written_out_now_and_then(tmp_path: Path) -> None:
    report = quiet(tmp_path, steps=20)
    for step in range(1, 21):
        report.step(record(step))
    report.close(plot=False)
    loads = [line["expert_load"] for line in read_metrics(tmp_path)]
    assert all(len(load["max"]) == len(load["entropy"]) == len(load["dead"]) == 2 for load in loads)
    written = {step: load for step, load in enumerate(loads, start=1) if "table" in load}
    assert list(written) == [1, 8, 16, 20]
    assert [load["table_steps"] for load in written.values()] == [1, 7, 8, 4]
    for step, load in written.items():
        assert load["layers"] == [1, 3]
        covered = [record(at).loads for at in range(step - load["table_steps"] + 1, step + 1)]
        assert load["table"] == [sum(counts[layer] for counts in covered).tolist() for layer in (1, 3)]  # type: ignore
    assert loads[0]["max"][1] == round(6 * max(loads[0]["table"][1]) / sum(loads[0]["table"][1]), 4)


def test_an_expert_is_dead_after_so_many_steps_without_a_token_and_lives_again() -> None:
    load = ExpertLoad(dead_after=3)
    idle, busy = np.array([4, 0, 4]), np.array([4, 1, 3])
    dead = [load.update(step, {0: counts})["balance/dead"] for step, counts in enumerate([idle] * 4 + [busy, idle], 1)]
    assert dead == [0, 0, 1, 1, 0, 0]


def test_a_layer_that_was_dropped_in_a_step_has_no_load_and_no_dead_experts() -> None:
    load = ExpertLoad(dead_after=2)
    load.update(1, {0: np.array([1, 1]), 1: np.array([2, 0])})
    for step in (2, 3, 4):
        line = load.update(step, {0: np.array([1, 1])})
        assert line["expert_load"]["max"] == [1.0, None] and line["expert_load"]["dead"] == [0, 0]
        assert line["balance/max"] == 1.0
    assert load.update(5, {0: np.array([1, 1]), 1: np.array([2, 0])})["expert_load"]["dead"] == [0, 1]


@pytest.mark.parametrize("form", ["tensor", "tensors", "lists"])
def test_loads_come_as_a_tensor_or_as_lists(tmp_path: Path, form: str) -> None:
    counts = [[3, 1], [0, 4]]
    loads: Any = {
        "tensor": torch.tensor(counts),
        "tensors": [torch.tensor(layer, dtype=torch.int32) for layer in counts],
        "lists": counts,
    }[form]
    report = quiet(tmp_path)
    (line,) = report.step(record(1, loads=loads))
    assert line["expert_load"]["table"] == counts and line["expert_load"]["max"] == [1.5, 2.0]
    assert line["balance/entropy"] == pytest.approx((0.8113 + 0.0) / 2, abs=1e-4)


def test_a_dense_model_has_no_expert_load(tmp_path: Path) -> None:
    report = quiet(tmp_path)
    (line,) = report.step(record(1, loads=None))
    assert "expert_load" not in line and not any(key.startswith("balance/") for key in line)
    (line,) = report.step(record(2, loads={}))
    assert "expert_load" not in line


# -- resuming and going back


@pytest.mark.parametrize("saved", [7, 8, 13])
@pytest.mark.parametrize("lost", [0, 1, 9])
def test_a_resumed_run_records_what_an_uninterrupted_one_does(tmp_path: Path, saved: int, lost: int) -> None:
    whole = quiet(tmp_path / "whole", steps=30)
    for step in range(1, 31):
        whole.step(record(step))
    whole.close(plot=False)

    first = quiet(tmp_path / "cut", steps=30)
    for step in range(1, saved + lost + 1):
        first.step(record(step))
        if step == saved:
            state = json.loads(json.dumps(first.state()))  # as a checkpoint keeps it
    del first  # killed: never closed
    second = quiet(tmp_path / "cut", steps=30, start=saved, state=state)
    for step in range(saved + 1, 31):
        second.step(record(step))
    second.close(plot=False)

    lines, expected = read_metrics(tmp_path / "cut"), read_metrics(tmp_path / "whole")
    assert list(map(timeless, lines)) == list(map(timeless, expected))
    assert [event["kind"] for event in read_events(tmp_path / "cut")] == ["resume"]


def test_without_a_state_the_tokens_are_counted_on_from_the_last_line(tmp_path: Path) -> None:
    report = quiet(tmp_path)
    for step in (1, 2, 3):
        report.step(record(step, tokens_in_step=10))
    again = quiet(tmp_path, start=2)
    (line,) = again.step(record(3, tokens_in_step=10))
    assert line["tokens"] == 30
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2, 3]


def test_going_back_drops_the_steps_and_keeps_their_losses_in_the_event(tmp_path: Path) -> None:
    report = quiet(tmp_path, steps=12)
    for step in range(1, 10):
        report.step(record(step, loss=float(step)))
        if step == 5:
            state = report.state()
    report.note("the loss rose to 9.0", kind="spike", loss=9.0)
    report.rewind(5, state, "loss spike")
    for step in range(6, 13):
        report.step(record(step, loss=100.0 + step))
    report.close(plot=False)

    lines = read_metrics(tmp_path)
    assert [line["loss"] for line in lines] == [1, 2, 3, 4, 5, *range(106, 113)]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 12
    assert lines[-1]["tokens"] == sum(record(step).tokens_in_step for step in range(1, 13))
    spike, rewind = read_events(tmp_path)
    assert (spike["kind"], spike["step"], spike["loss"]) == ("spike", 9, 9.0)
    assert (rewind["kind"], rewind["step"], rewind["to"], rewind["loss"]) == ("rewind", 9, 5, [6.0, 7.0, 8.0, 9.0])


def test_a_new_run_in_an_old_directory_begins_a_new_record(tmp_path: Path) -> None:
    for _ in range(2):
        report = quiet(tmp_path)
        report.note("hello")
        report.step(record(1))
        report.close(plot=False)
    assert len(read_metrics(tmp_path)) == 1 and len(read_events(tmp_path)) == 1


# -- reading late


class Slow(DeviceRead):
    """A device that never says it is done; reading waits for it."""

    waited: list[int] = []

    def ready(self) -> bool:
        return False

    def numbers(self) -> list[Any]:
        self.waited.append(1)
        return super().numbers()


def test_values_on_their_way_are_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_module, "DeviceRead", Slow)
    Slow.waited = []
    report = quiet(tmp_path)
    for step in range(1, MAX_IN_FLIGHT + 1):
        assert report.step(record(step)) == [] and not Slow.waited
    assert [line["step"] for line in report.step(record(MAX_IN_FLIGHT + 1))] == [1]  # the oldest, and no more
    assert len(Slow.waited) == 1 and len(read_metrics(tmp_path)) == 1
    report.state()
    assert [line["step"] for line in read_metrics(tmp_path)] == list(range(1, MAX_IN_FLIGHT + 2))


def test_a_buffer_may_be_used_again_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_module, "DeviceRead", Slow)
    report = quiet(tmp_path)
    loss, counts_LE = torch.tensor(1.0), torch.tensor([[1, 2]])
    for step in (1, 2, 3):
        report.step(record(step, loss=loss, loads=counts_LE))
        loss += 1
        counts_LE.zero_()
        counts_LE += step + 1
    report.close(plot=False)
    lines = read_metrics(tmp_path)
    assert [line["loss"] for line in lines] == [1.0, 2.0, 3.0]
    assert lines[0]["expert_load"]["table"] == [[1, 2]]


def test_numbers_come_back_whole_and_in_order() -> None:
    given = [
        torch.tensor(1.1),
        torch.tensor([2**40 + 1, 3]),
        torch.tensor(True),
        torch.tensor(0.5, dtype=torch.bfloat16),
    ]
    numbers = DeviceRead(given).numbers()
    assert [values.tolist() for values in numbers] == [[float(torch.tensor(1.1))], [2**40 + 1, 3], [1.0], [0.5]]
    assert DeviceRead([]).ready() and DeviceRead([]).numbers() == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_is_never_made_to_wait(tmp_path: Path) -> None:
    report = quiet(tmp_path, steps=30)
    ones = torch.ones((), device="cuda")
    loads = torch.arange(1, 9, device="cuda").reshape(2, 4)
    big = torch.randn(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        queued = 0
        for step in range(1, 31):
            for _ in range(20):
                big = (big @ big).clamp(-1, 1)
            report.step(record(step, loss=ones * step + 0 * big[0, 0], skipped=ones > 2, loads=loads * step))
            done = torch.cuda.Event()
            done.record()
            queued += not done.query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    report.close(plot=False)
    lines = read_metrics(tmp_path)
    assert [line["loss"] for line in lines] == list(range(1, 31))
    assert lines[0]["expert_load"]["table"] == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert queued >= 28, f"the device had run out of work after {30 - queued} of 30 steps"


# -- what is shown


def shown(directory: Path, steps: int, seconds_a_step: float, **options: Any) -> str:
    stream = io.StringIO()
    now = iter(np.arange(0, 1e6, seconds_a_step))
    report = Report(
        directory,
        steps,
        tensorboard=False,
        console=Console(file=stream, force_terminal=False),
        clock=lambda: float(next(now)),
        **options,
    )
    for step in range(1, steps + 1):
        report.step(record(step, seconds=seconds_a_step))
        if step == 12:
            report.note("saved", kind="save")
    report.close(plot=False)
    return stream.getvalue()


def test_without_a_terminal_there_is_a_plain_line_now_and_then(tmp_path: Path) -> None:
    lines = shown(tmp_path, 14, 2.0, every=10, peak_flops=1e8).splitlines()
    assert [line.split()[1] for line in lines] == ["1/14", "6/14", "11/14", "12:", "14/14"]
    assert lines[3] == "step 12: saved"
    assert lines[0] == "step 1/14  loss 8.0000  lr 1.00e-03  50 tokens/s  MFU 50%  26 s left"
    assert "left" not in lines[-1]
    assert "\x1b" not in "".join(lines)


def test_quiet_prints_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(tmp_path / "quiet", 14, 2.0, quiet=True) == ""
    assert capsys.readouterr().out == ""
    assert "step 1/14" in shown(tmp_path / "plain", 14, 2.0)  # on standard error
    assert capsys.readouterr().out.splitlines() == [
        f"{tmp_path / 'plain'}: trained 14 steps, 1.4 k tokens in 28 s, loss 8.000 to 2.429.",
        f"Inspect it: moesaic show {tmp_path / 'plain'}",
    ]


def test_the_end_says_what_was_made_and_how_to_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyboardInterrupt):
        with Report(tmp_path, 100, tensorboard=False, dead_after=2) as report:
            report.step(record(1))
            report.step(record(2, skipped=True))
            raise KeyboardInterrupt
    text = capsys.readouterr().out
    assert "stopped after 2 of 100 steps" in text and text.endswith("Resume: run the same command again\n")
    assert "not finite: 1." in text and "Dead experts (no tokens): 1;" in text
    assert f"Plots: {tmp_path / 'training.png'}" in text

    with pytest.raises(ZeroDivisionError):
        with Report(tmp_path, 100, start=2, tensorboard=False):
            raise ZeroDivisionError
    assert capsys.readouterr().out == ""  # the error is what is said then

    report = Report(tmp_path, 3, start=2, tensorboard=False, dead_after=9)
    report.step(record(3))
    summary = report.close(plot=False)
    assert capsys.readouterr().out.endswith(f"Inspect it: moesaic show {tmp_path}\n")
    assert (summary["outcome"], summary["step"], summary["skipped"], summary["first_loss"]) == ("finished", 3, 1, 8.0)
    assert json.dumps(summary) and report.close() == {}


def test_the_end_of_one_step_in_a_place_with_a_space_can_be_copied(tmp_path: Path) -> None:
    Report(tmp_path / "my run", 1, quiet=True, tensorboard=False).close(plot=False)
    summary = summarize(tmp_path / "my run", 1, "finished") | {"step": 1}
    said = final_summary(summary)
    assert "trained 1 step," in said[0]
    assert shlex.split(said[-1].removeprefix("Inspect it: ")) == ["moesaic", "show", str(tmp_path / "my run")]


def drawn(progress: Progress, width: int) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None, legacy_windows=False)
    with console.capture() as capture:
        console.print(progress)
    return capture.get().rstrip("\n")


def test_the_line_fits_its_terminal_and_keeps_what_matters_most() -> None:
    progress = Progress(1000)
    line = {"step": 250, "loss": 3.0, "lr": 1e-3, "tokens_per_second": 12_345.0, "seconds": 0.5, "skipped": False}
    progress.update(line | {"mfu": 0.41})
    for width in range(30, 140):
        text = drawn(progress, width)
        assert len(text) < width and "\n" not in text and "step 250/1,000  loss 3.0000" in text
    assert drawn(progress, 140).count("━") == 30
    assert drawn(progress, 66).endswith("step 250/1,000  loss 3.0000  12,345 tokens/s  6 min 15 s left")


def test_the_loss_shown_is_smoothed_and_survives_a_nan() -> None:
    progress = Progress(100)
    for step in range(1, 60):
        loss = None if step == 30 else 2.0 + 0.5 * (-1) ** step
        line = {"step": step, "loss": loss, "lr": 1e-3, "tokens_per_second": 1.0, "seconds": 1.0, "skipped": step == 30}
        progress.update(line)
    assert "loss 1.9" in progress.plain() or "loss 2.0" in progress.plain()
    assert "1 skipped" in progress.plain() and "41 s left" in progress.plain()


TERMINAL = """
import sys, time
from moesaic.train.report.report import Report, StepRecord
with Report(sys.argv[1], 40, tensorboard=False) as report:
    for step in range(1, 21):
        report.step(StepRecord(step, 3.0, 1e-3, 100, 0.05))
        time.sleep(0.03)
        if step == 10:
            report.note("saved", kind="save")
    report.close("stopped", plot=False)
"""


def test_on_a_terminal_the_line_is_live_and_the_terminal_is_left_as_it_was(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "110", "LINES": "30"}
    process = start(TERMINAL, tmp_path, stderr=theirs, env=environment)
    os.close(theirs)
    seen = b""
    while process.poll() is None or select.select([ours], [], [], 0)[0]:
        if select.select([ours], [], [], 0.1)[0]:
            try:
                seen += os.read(ours, 65_536)
            except OSError:  # the other end is closed
                break
    out, _ = process.communicate()
    os.close(ours)
    text = seen.decode()
    assert text.count("tokens/s") > 2 and "━" in text and "step 10: saved" in text
    assert "left" in text and "loss 3.0000" in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")  # the cursor is back
    assert "stopped after 20 of 40 steps" in out and "\x1b" not in out


def test_durations_and_amounts_read_well() -> None:
    assert [readable_duration(s) for s in (0.04, 9.94, 59.4, 59.6, 61, 3599.6, 7300, 200_000)] == [
        "0.0 s",
        "9.9 s",
        "59 s",
        "1 min 00 s",
        "1 min 01 s",
        "1 h 00 min",
        "2 h 01 min",
        "2 d 7 h",
    ]
    assert [readable_count(n) for n in (0, 999, 1500, 2_000_000, 3 * 10**12)] == ["0", "999", "1.5 k", "2.0 M", "3.0 T"]


# -- utilisation


def small(mtp: bool = False, window: int | None = None) -> ModelConfig:
    experts = Layer(Experts(count=4, per_token=2, hidden=6), window=window)
    return ModelConfig(
        family="moesaic",
        vocab=16,
        hidden=8,
        attention=GroupedQuery(heads=2, kv_heads=1, head_size=4),
        rope=Rope(size=4),
        layers=(Layer(Dense(12), window=window), experts),
        mtp=(experts,) if mtp else (),
    )


def test_flops_of_a_step_by_hand() -> None:
    attention = 8 * 8 + 8 * 4 + 8 * 4 + 8 * 8
    dense, mixture = 3 * 8 * 12, 4 * 8 + 2 * 3 * 8 * 6  # the router, and two experts of four
    matrices = 2 * attention + dense + mixture + 16 * 8  # and the output matrix; the embedding is looked up
    pairs = 32 * 33 // 2  # of a token and those before it, and itself
    assert training_flops(small(), [32]) == 6 * matrices * 32 + 12 * 2 * 8 * pairs
    assert training_flops(small(window=32), [32]) == training_flops(small(), [32])
    near = 8 * 9 // 2 + 24 * 8  # eight keys at most
    assert training_flops(small(window=8), [32]) == 6 * matrices * 32 + 12 * 2 * 8 * near
    # Two sequences need less than one that is as long as both: a token sees its own alone.
    assert training_flops(small(), [32, 32]) == 2 * training_flops(small(), [32]) < training_flops(small(), [64])
    assert training_flops(small(), []) == 0  # a step of rollouts of which none was left


def test_layers_that_predict_further_tokens_count_while_they_are_trained() -> None:
    plain, with_mtp = training_flops(small(), [32]), training_flops(small(mtp=True), [32])
    assert TRAINING * forward_flops(small(mtp=True), [Chunk(32)]) == plain
    block = 192 + 4 * 8 + 2 * 3 * 8 * 6
    joined = 2 * 8 * 8  # the projection of hidden state and embedding
    assert with_mtp - plain == 6 * (block + joined + 16 * 8) * 32 + 12 * 8 * (32 * 33 // 2)


def test_the_peak_is_measured_once_and_leaves_the_random_numbers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.random.get_rng_state()
    found = peak_flops(torch.device("cpu"), torch.float32, 0.05)
    assert torch.equal(before, torch.random.get_rng_state())
    assert 1e8 < found < 1e14
    monkeypatch.setattr("torch.mm", lambda *given, **named: pytest.fail("it is measured again"))
    assert peak_flops(torch.device("cpu"), torch.float32, 0.05) == found


def test_the_peak_of_a_slow_dtype_is_found_with_small_products(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    # A tenth of a second for the smallest, and eight times as long for each doubling.
    def product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        sizes.append(len(a))
        clock[0] += 0.1 * (len(a) / 128) ** 3

    clock = [0.0]
    monkeypatch.setattr("torch.mm", product)
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    found = peak_flops(torch.device("cpu"), torch.float16, 0.31)
    assert set(sizes) == {128} and found == pytest.approx(2 * 128**3 / 0.1)


# -- TensorBoard


def scalars(directory: Path) -> Iterator[tuple[str, int, float]]:
    event_type = importlib.import_module("tensorboardX.proto.event_pb2").Event
    for file in sorted(directory.glob("tensorboard/events*")):
        raw = file.read_bytes()
        while raw:  # a record: length, its checksum, the event, its checksum
            (length,) = struct.unpack("<Q", raw[:8])
            event = event_type.FromString(raw[12 : 12 + length])
            raw = raw[16 + length :]
            for value in event.summary.value:
                yield value.tag, event.step, value.simple_value


def test_tensorboard_files_hold_the_same_numbers(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    report = quiet(tmp_path, tensorboard=True)
    for step in (1, 2, 3):
        report.step(record(step, parts={"loss/mtp": 0.5 * step}))
    report.close(plot=False)
    found = {(tag, step): value for tag, step, value in scalars(tmp_path)}
    for line in read_metrics(tmp_path):
        for key in ("loss", "lr", "tokens_per_second", "loss/mtp", "balance/entropy", "balance/dead"):
            assert found[key, line["step"]] == pytest.approx(line[key], rel=1e-6)


def test_tensorboard_files_after_a_rewind(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    report = quiet(tmp_path, tensorboard=True)
    for step in (1, 2, 3):
        report.step(record(step))
    report.rewind(1)
    report.step(record(2))
    report.close(plot=False)
    assert [step for tag, step, _ in scalars(tmp_path) if tag == "loss"] == [1, 2, 3, 2]
    event_type = importlib.import_module("tensorboardX.proto.event_pb2").Event
    raw = sorted(tmp_path.glob("tensorboard/events*"))[-1].read_bytes()
    (first,) = struct.unpack("<Q", raw[:8])  # a mark of the format's version, and then where the steps go on
    (length,) = struct.unpack("<Q", raw[16 + first :][:8])
    assert event_type.FromString(raw[28 + first : 28 + first + length]).step == 2


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a disk that is full")
def test_a_full_disk_ends_the_curves_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    writer = pytest.importorskip("tensorboardX.record_writer")
    monkeypatch.setattr(writer, "open_file", lambda path: open("/dev/full", "wb"))  # noqa: SIM115
    report = Report(tmp_path, 40, every=0)
    for step in range(1, 41):
        report.step(record(step))
    report.close(plot=False)
    text = capfd.readouterr().err
    assert text.count("step 1: no TensorBoard files from here on (No space left on device)") == 1
    assert len(read_metrics(tmp_path)) == 40 and "Traceback" not in text
    assert [event["kind"] for event in read_events(tmp_path)] == ["tensorboard"]
    # A disk that takes no event either.
    monkeypatch.setattr(Journal, "append", no_room)
    Report(tmp_path / "second", 40).close(plot=False)
    assert "no TensorBoard files" in capfd.readouterr().err


def no_room(journal: Journal, line: dict[str, Any]) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(journal.file))


def test_without_tensorboard_there_is_one_note_and_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboardX.event_file_writer", None)
    text = shown(tmp_path / "a", 14, 2.0)
    assert "TensorBoard" not in text  # it was not asked for
    report = quiet(tmp_path / "b", tensorboard=True)
    report.step(record(1))
    report.close(plot=False)
    assert [event["text"] for event in read_events(tmp_path / "b")] == [
        "no TensorBoard files: tensorboardX is not installed"
    ]
    assert not (tmp_path / "b" / "tensorboard").exists()


# -- pictures


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A mixture that spiked and went back, and a dense run."""
    root = tmp_path_factory.mktemp("runs")
    report = quiet(root / "mixture", steps=60, peak_flops=1e11)
    for step in range(1, 31):
        report.step(record(step, loss=2 + 6 / step + 5 * (step > 26), parts={"loss/mtp": 3 + 6 / step}))
        if step == 20:
            state = report.state()
    report.note("the loss spiked", kind="spike")
    report.rewind(20, state, "loss spike")
    for step in range(21, 61):
        report.step(record(step, skipped=step == 33, loss=math.nan if step == 33 else 2 + 6 / step))
    report.close(plot=False)
    report = quiet(root / "dense", steps=5)
    for step in range(1, 6):
        report.step(record(step, loads=None))
    report.close(plot=False)
    return {"mixture": root / "mixture", "dense": root / "dense"}


def pixels(file: Path) -> np.ndarray[Any, Any]:
    from matplotlib.image import imread

    assert file.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    return np.asarray(imread(str(file)))[..., :3]


def has_colour(picture: np.ndarray[Any, Any], colour: str) -> bool:
    wanted = np.array([int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    return bool((np.abs(picture - wanted).max(-1) < 0.02).sum() > 20)


@pytest.mark.figures
def test_the_curves_of_a_run_are_drawn(runs: dict[str, Path]) -> None:
    from moesaic.train.report.plot import ALARM, COLOURS

    file = plot_run(runs["mixture"])
    assert file == runs["mixture"] / "training.png"
    picture = pixels(file)
    assert min(picture.shape[:2]) > 700
    # Every panel, top to bottom and left to right, has something in it.
    rows, columns = np.array_split(np.arange(picture.shape[0]), 3), np.array_split(np.arange(picture.shape[1]), 2)
    assert all(picture[np.ix_(row, column)].var() > 1e-3 for row in rows for column in columns)
    assert has_colour(picture, ALARM) and has_colour(picture, "#d9d9d9")  # the rewind; the pyramid's empty corner
    assert all(has_colour(picture, colour) for colour in COLOURS[:4])

    plain = pixels(plot_run(runs["dense"], runs["dense"] / "other.png"))
    assert plain.shape[0] < picture.shape[0] and plain.var() > 1e-3 and not has_colour(plain, ALARM)


@pytest.mark.figures
def test_runs_are_drawn_over_each_other(runs: dict[str, Path], tmp_path: Path) -> None:
    from moesaic.train.report.plot import COLOURS

    picture = pixels(plot_runs(runs, tmp_path / "deep" / "compare.png"))
    assert has_colour(picture, COLOURS[0]) and has_colour(picture, COLOURS[1]) and not has_colour(picture, COLOURS[2])
    assert os.listdir(tmp_path / "deep") == ["compare.png"]
    with pytest.raises(UserError):
        plot_runs({}, tmp_path / "none.png")


@pytest.mark.figures
def test_a_run_of_one_step_or_without_a_finite_loss_is_drawn_too(tmp_path: Path) -> None:
    for name, losses in {"one": [3.0], "none": [math.nan, math.nan]}.items():
        report = quiet(tmp_path / name)
        for step, loss in enumerate(losses, start=1):
            report.step(record(step, loss=loss, loads=record(1).loads if name == "one" else None))
        assert report.close()["picture"] == str(tmp_path / name / "training.png")
        assert pixels(tmp_path / name / "training.png").var() > 1e-3


def test_a_picture_that_fails_does_not_fail_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    report = quiet(tmp_path)
    report.step(record(1))
    assert report.close()["picture"] is None
    assert "could not plot the curves" in read_events(tmp_path)[-1]["text"]


def test_smoothing_follows_a_line_to_its_ends_and_passes_over_gaps() -> None:
    line: Any = 9.0 - 0.1 * np.arange(50)
    assert np.allclose(smooth(line), line)
    holes = line.copy()
    holes[[0, 7, 20, 21, 49]] = np.nan
    assert np.allclose(smooth(holes), line)
    noise = np.random.default_rng(0).normal(0, 1, 2000)
    assert smooth(noise).std() < 0.25
    assert smooth(np.array([4.0])).tolist() == [4.0] and np.isnan(smooth(np.array([np.nan]))).all()


def test_the_life_is_drawn_in_a_terminal() -> None:
    metrics = [
        {"step": step, "loss": 2 + 6 / step, "tokens": 100 * step, "seconds": 0.1, "skipped": step == 9}
        for step in range(1, 301)
    ]
    rows = loss_plot(metrics, width=40, height=5).splitlines()
    assert len(rows) == 8
    assert rows[0].startswith("5.") and rows[4].startswith("2.020 ┤") and rows[6].split() == ["step", "1", "300"]
    assert rows[7] == "loss 8.000 to 2.020 in 300 steps, 30.0 k tokens, 30 s, 1,000 tokens/s, 1 skipped"
    dots = [row.split("┤")[-1].split("│")[-1] for row in rows[:5]]
    first = [next((place for place, cell in enumerate(row) if cell != chr(0x2800)), 99) for row in dots]
    assert first == sorted(first) and first[0] == 0  # it falls from the left
    assert len(dots[4]) == 40 and all(len(row) < 40 for row in dots[:4])  # and ends at the bottom right


@pytest.mark.parametrize(
    "losses", [[], [None], [math.nan], [2.0], [2.0, 2.0], [-1.0, 0.0, 3.0], [None, 3.0, None, 2.0]]
)
def test_any_life_can_be_drawn(losses: list[float | None]) -> None:
    text = loss_plot([{"step": step, "loss": loss} for step, loss in enumerate(losses, start=1)])
    known = [loss for loss in losses if loss is not None and math.isfinite(loss)]
    assert bool(text) == bool(known)
    assert not known or any(0x2800 < ord(letter) < 0x2900 for letter in text)


def test_one_step_costs_little(tmp_path: Path, timed: Callable[[Callable[[], object]], float]) -> None:
    report = quiet(tmp_path, steps=10**6, full_every=100)
    loads = torch.full((46, 128), 5)
    steps = iter(range(1, 10**6))
    assert timed(lambda: report.step(record(next(steps), loads=loads))) < 0.02  # a step of such a model takes seconds


@pytest.fixture
def timed() -> Callable[[Callable[[], object]], float]:
    def best(work: Callable[[], object]) -> float:
        found = []
        for _ in range(20):
            begin = time.process_time()  # what others do on this machine does not count
            work()
            found.append(time.process_time() - begin)
        return min(found)

    return best
