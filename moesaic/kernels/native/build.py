"""Compile the C sources of this folder once per machine and source, and load them.

The compiler is the system's (cc, gcc or clang). Where there is none, or it fails, there are no native kernels, the
library calls of `kernels.cpu` do all the work, and `NotBuilt` says why.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import platform
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch  # noqa: F401  (loads the OpenMP runtime that is looked for below)

from moesaic import atomic

logger = logging.getLogger("moesaic.kernels")
SOURCES = Path(__file__).parent
FLAGS = ("-std=gnu11", "-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-fPIC", "-fno-schedule-insns")
COMPILERS = ("cc", "gcc", "clang")
DIGEST = 32  # bytes of a checksum behind the library: a file cut short must not be mapped


class NotBuilt(Exception):
    """There are no native kernels: why, in a line."""


def compiler() -> str | None:
    return next((found for name in COMPILERS if (found := shutil.which(name))), None)


def cache_folder() -> Path:
    return Path.home() / ".cache" / "moesaic" / "native"


def threading_runtime() -> str | None:
    """The OpenMP runtime that PyTorch runs on. There must be no second one: each would keep all cores spinning."""
    try:
        mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/" in line}
    except OSError:
        return None
    names = ("libgomp", "libiomp", "libomp")
    return next((path for path in sorted(mapped) if Path(path).name.startswith(names)), None)


def library(folder: Path, compiler: str | None) -> ctypes.CDLL:
    """The compiled kernels, from `folder` if they are there."""
    if compiler is None:
        raise NotBuilt(f"there is no C compiler ({', '.join(COMPILERS)})")
    runtime = threading_runtime()
    problem = ""
    # Not linked against a runtime of the compiler's choice: its functions are found in the one already loaded.
    for threads in (("-fopenmp",), ()) if runtime else ((),):
        try:
            if runtime:
                ctypes.CDLL(runtime, mode=ctypes.RTLD_GLOBAL)
            return _load(folder, compiler, threads)
        except (OSError, subprocess.SubprocessError) as error:
            problem = f"{compiler}: {_said(error)}"
    raise NotBuilt(problem)


def _said(error: Exception) -> str:
    """The line of a compiler's complaint that says what is wrong."""
    if isinstance(error, subprocess.CalledProcessError):
        lines = [line.strip() for line in error.stderr.decode(errors="replace").splitlines() if line.strip()]
        found = next((line for line in lines if "error" in line.lower()), lines[0] if lines else "")
        return found[:300] or f"ended with status {error.returncode} and said nothing"
    if isinstance(error, subprocess.TimeoutExpired):
        return f"took longer than {error.timeout:.0f} s"
    return str(error)[:300]


def _load(folder: Path, compiler: str, threads: tuple[str, ...]) -> ctypes.CDLL:
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True, timeout=60).stdout
    sources = sorted(SOURCES.glob("*.[ch]"))
    parts = [version, _processor(), " ".join(FLAGS + threads).encode(), *(file.read_bytes() for file in sources)]
    file = folder / f"{hashlib.sha256(b''.join(hashlib.sha256(part).digest() for part in parts)).hexdigest()[:24]}.so"
    if not _whole(file):
        _compile(file, compiler, threads)
    return ctypes.CDLL(str(file))


def _processor() -> bytes:
    """What -march=native depends on: a home folder may be shared by different machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    kinds = ("model name", "flags", "Features", "CPU part", "CPU implementer")
    told = sorted({line for line in lines if line.startswith(kinds)})
    return "\n".join([platform.machine(), *told]).encode()


def _whole(file: Path) -> bool:
    try:
        data = file.read_bytes()
    except OSError:
        return False
    return len(data) > DIGEST and hashlib.sha256(data[:-DIGEST]).digest() == data[-DIGEST:]


def _compile(file: Path, compiler: str, threads: tuple[str, ...]) -> None:
    """Build beside the place and move there whole: two processes may do so at once, and either result serves both."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent) as work:
        built = Path(work) / "kernels.so"
        sources = [str(source) for source in sorted(SOURCES.glob("*.c"))]
        objects = [f"{work}/{Path(source).stem}.o" for source in sources]
        with ThreadPoolExecutor() as pool:
            commands = [
                [compiler, *FLAGS, *threads, "-c", source, "-o", to]
                for source, to in zip(sources, objects, strict=True)
            ]
            list(pool.map(_run, commands))
        _run([compiler, "-shared", *objects, "-lm", "-o", str(built)])
        data = built.read_bytes()
        atomic.write_bytes(file, data + hashlib.sha256(data).digest())


def _run(command: list[str]) -> None:
    subprocess.run(command, capture_output=True, check=True, timeout=300)
