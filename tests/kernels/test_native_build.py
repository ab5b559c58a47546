"""Compiling the native kernels: once, whole, by several processes at once; and doing without."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from moesaic import doctor, kernels
from moesaic.kernels import cpu, native
from moesaic.kernels.native import build
from tests.waiting import PATIENCE

COMPILER = build.compiler()


def answers(library: ctypes.CDLL) -> None:
    x, weight = torch.randn(3, 20), torch.randn(7, 20)
    with torch.inference_mode():
        y = native.NativeKernels(library).linear(x, weight)
    torch.testing.assert_close(y, x @ weight.t())


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("native")
    answers(build.library(folder, COMPILER))
    (file,) = folder.iterdir()
    return file


def copying(folder: Path, built: Path, seconds: float = 0.0) -> str:
    """A compiler that gives what was built before, whatever it is asked for, and takes so long."""
    program = folder / "cc"
    program.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && exit 0\nsleep {seconds}\n'
        f'while [ "$1" != -o ]; do shift; done\nhead -c -{build.DIGEST} {built} > "$2"\n'
    )
    program.chmod(0o755)
    return str(program)


def test_compiles_once(built):
    made = built.stat().st_mtime_ns
    answers(build.library(built.parent, COMPILER))
    assert [other.stat().st_mtime_ns for other in built.parent.iterdir()] == [made]


@pytest.mark.parametrize("harm", ["cut", "changed"])
def test_a_broken_file_is_built_again(tmp_path, built, harm):
    compiler, cache = copying(tmp_path, built), tmp_path / "cache"
    answers(build.library(cache, compiler))
    (file,) = cache.iterdir()
    data = file.read_bytes()
    # In place of the file, as after a crash: what this process has mapped stays.
    file.unlink()
    file.write_bytes(data[: len(data) // 2] if harm == "cut" else data[:5000] + b"?" + data[5001:])
    answers(build.library(cache, compiler))
    assert file.read_bytes() == data


def test_another_processor_compiles_for_itself(tmp_path, built, monkeypatch):
    """A home folder may be shared by machines: what one compiled may hold instructions that another lacks."""
    compiler = copying(tmp_path, built)
    flags = "flags\t\t: fpu sse2 avx2 fma", "flags\t\t: fpu sse2 avx2 fma avx512f avx512bw avx512_vnni"
    read = Path.read_text
    for number, line in enumerate(flags, start=1):
        monkeypatch.setattr(Path, "read_text", lambda self, f=line: f if str(self) == "/proc/cpuinfo" else read(self))
        answers(build.library(tmp_path / "cache", compiler))
        monkeypatch.undo()
        assert len(list((tmp_path / "cache").iterdir())) == number


@pytest.fixture
def anew(tmp_path, monkeypatch):
    """Kernels are looked for again, in a folder where none are."""
    monkeypatch.setattr(build, "cache_folder", lambda: tmp_path / "cache")
    native.built.cache_clear()
    yield
    native.built.cache_clear()


def test_without_a_compiler_the_library_serves(tmp_path, monkeypatch, caplog, anew):
    with pytest.raises(build.NotBuilt, match="no C compiler"):
        build.library(tmp_path / "cache", None)
    monkeypatch.setattr(build, "compiler", lambda: None)
    assert kernels.choose("cpu") is cpu and kernels.choose("cpu") is cpu
    assert not (tmp_path / "cache").exists()
    assert [record.levelname for record in caplog.records] == ["WARNING"], "said, and once"
    assert "no C compiler" in caplog.text


def failing(folder: Path, saying: str) -> str:
    program = folder / "cc"
    program.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exit 0\n{saying}\nexit 1\n')
    program.chmod(0o755)
    return str(program)


def test_a_compiler_that_fails_is_heard(tmp_path, monkeypatch, caplog, anew):
    """Whatever is wrong with the sources or the compiler: library calls would give the same, only slower."""
    saying = 'echo "rows.c: In function rows:" >&2; echo "rows.c:7:3: error: conflicting types for gate" >&2'
    compiler = failing(tmp_path, saying)
    monkeypatch.setattr(build, "compiler", lambda: compiler)
    assert kernels.choose("cpu") is cpu
    assert "rows.c:7:3: error: conflicting types for gate" in caplog.text and compiler in caplog.text
    assert "\n" not in caplog.messages[0] and "moesaic doctor" in caplog.messages[0]
    told = {finding.name: finding for finding in doctor.examine()}["compiled kernels"]
    assert not told.fine and "conflicting types for gate" in told.found and "compiler" in told.remedy


@pytest.mark.parametrize(("saying", "told"), [("true", "status 1 and said nothing"), ("echo Killed >&2", "cc: Killed")])
def test_a_compiler_that_says_little(tmp_path, saying, told):
    with pytest.raises(build.NotBuilt, match=told):
        build.library(tmp_path / "cache", failing(tmp_path, saying))


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(build.NotBuilt, match="file"):
        build.library(tmp_path / "file" / "cache", COMPILER)


def test_processes_that_start_at_once(tmp_path, built):
    program = (
        "import sys, torch\nfrom pathlib import Path\nfrom moesaic.kernels import native\n"
        "from moesaic.kernels.native import build\n"
        "ops = native.NativeKernels(build.library(Path(sys.argv[1]), sys.argv[2]))\n"
        "with torch.inference_mode():\n"
        "    print(ops.linear(torch.ones(2, 8), torch.ones(3, 8)).sum().item())\n"
    )
    cache, compiler = str(tmp_path / "cache"), copying(tmp_path, built, seconds=1.0)
    runs = [
        subprocess.Popen([sys.executable, "-c", program, cache, compiler], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    assert [run.communicate(timeout=PATIENCE)[0].strip() for run in runs] == ["48.0"] * 2
    assert len(list(Path(cache).iterdir())) == 1, "nothing is left behind"


RUNTIMES = """
from pathlib import Path
from moesaic.kernels import native
from moesaic.kernels.native import build
assert native.kernels() is not None
mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/" in line}
runtimes = {path for path in mapped if Path(path).name.startswith(("libgomp", "libiomp", "libomp"))}
assert runtimes == {build.threading_runtime()}, runtimes
"""


def test_one_threading_runtime():
    """A second one would keep its own threads spinning beside PyTorch's. In a process of its own: packages that other
    tests compare with bring theirs along."""
    done = subprocess.run([sys.executable, "-c", RUNTIMES], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr[-2000:]


# One of three threads is late by 0.4 seconds, ten times; tells the processor's seconds that were spent meanwhile.
LATE = """
#include "team.h"
#include <stdio.h>
#include <time.h>
#include <unistd.h>

int main(void) {
    Team team = {0};
    long seen = 0;
#pragma omp parallel num_threads(3) reduction(+ : seen)
    {
        Member m = join(&team);
        for (int round = 0; round < 10; round++) {
            if (round % m.size == omp_get_thread_num()) usleep(400000), team.taken[round] = round + 1;
            meet(&m);
            seen += team.taken[round];
        }
    }
    printf("%ld %f\\n", seen, (double)clock() / CLOCKS_PER_SEC);
}
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere threads only offer their core")
def test_threads_that_wait_for_a_late_one_sleep(tmp_path):
    """Whoever is late may be waiting for the very core that a spinning thread keeps."""
    (tmp_path / "late.c").write_text(LATE)
    made = [COMPILER, "-std=gnu11", "-O2", "-fopenmp", f"-I{build.SOURCES}", "late.c", "-o", "late"]
    if subprocess.run(made, cwd=tmp_path, capture_output=True).returncode:
        pytest.skip("the compiler has no OpenMP of its own")
    out = subprocess.run([tmp_path / "late"], capture_output=True, text=True, check=True, timeout=PATIENCE).stdout
    seen, seconds = out.split()
    assert int(seen) == 3 * sum(range(1, 11))
    assert float(seconds) < 0.3, "of 8 that they would spin"
