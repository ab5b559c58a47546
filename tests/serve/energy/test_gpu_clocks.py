"""Clocks are set through NVML, and given back however the one who set them ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from moesaic.errors import UserError
from moesaic.serve.energy.gpu_clocks import GpuClocks, thinned
from tests.waiting import until

HERE = Path(__file__).parent  # where a pynvml lies that only writes down what it is told


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "nvml.log"
    file.touch()
    monkeypatch.setenv("FAKE_NVML", str(file))
    monkeypatch.syspath_prepend(str(HERE))
    return file


def test_set_and_reset(log: Path):
    clocks = GpuClocks(["GPU-1", "GPU-2"])
    assert (len(clocks.levels), clocks.levels[0], clocks.levels[-1]) == (16, 345.0, 1980.0)
    assert clocks.set(clocks.levels[3])
    until(lambda: f"lock GPU-2 {clocks.levels[3]:.0f}" in log.read_text())
    clocks.close()
    assert log.read_text().splitlines()[-3:] == ["reset GPU-1", "reset GPU-2", "shutdown"]
    assert not clocks.set(1980.0)  # and nothing again
    assert log.read_text().splitlines()[-1] == "shutdown"


PROGRAM = """
import sys, time
from moesaic.serve.energy.gpu_clocks import GpuClocks
clocks = GpuClocks(["GPU-7"])
clocks.set(1005)
print("set", flush=True)
if sys.argv[1] == "fails":
    raise SystemExit("an error")
if sys.argv[1] == "stays":
    time.sleep(600)
"""


@pytest.mark.parametrize("how", ["ends", "fails", "stays"])
def test_reset_however_the_engine_ends(how: str, log: Path):
    """`stays` is killed, which no handler sees."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])}
    command = [sys.executable, "-c", PROGRAM, how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment) as engine:
        assert engine.stdout is not None and engine.stdout.readline() == b"set\n"
        if how == "stays":
            engine.kill()
    until(lambda: log.read_text().endswith("lock GPU-7 1005\nreset GPU-7\nshutdown\n"), "the clock to be reset")


def test_one_that_dies_is_replaced(log: Path):
    clocks = GpuClocks(["GPU-1"])
    first = clocks.pid
    os.kill(first, signal.SIGKILL)
    until(lambda: clocks.set(990.0) and clocks.pid != first, "another keeper")
    until(lambda: "lock GPU-1 990" in log.read_text())
    clocks.close()
    assert log.read_text().endswith("reset GPU-1\nshutdown\n")


def test_what_keeps_it_from_that_is_said(log: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(UserError, match="Not Found"):
        GpuClocks(["nonsense"])
    monkeypatch.setenv("FAKE_NVML_REFUSES", "1")
    with pytest.raises(UserError, match="Insufficient Permissions.*root"):
        GpuClocks(["GPU-1"])
    assert log.read_text().endswith("reset GPU-1\nshutdown\n")
    monkeypatch.setattr("moesaic.serve.energy.gpu_clocks.PROGRAM", BLOCKED)
    with pytest.raises(UserError, match="nvidia-ml-py is not installed"):
        GpuClocks(["GPU-1"])


BLOCKED = """
import sys
sys.path[:] = {path!r}
sys.modules["pynvml"] = None
from moesaic.serve.energy.keeper import main
main({uuids!r})
"""


def test_thinned():
    assert thinned([5, 1, 3]) == (1, 3, 5)
    assert thinned(range(100), 4) == (0, 33, 66, 99)
