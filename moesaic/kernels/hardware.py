"""What this machine does well: which device, how many threads, which dtype.

Looked up, never measured: a measurement on a busy machine comes out now so, now so, and with it every bit of a model.
"""

from __future__ import annotations

import os
import platform
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

# Instruction sets that make matmuls in a dtype faster than in float32, as Linux names them: one of these, best first.
# On ARM PyTorch multiplies float16 without the instructions that many processors have for it.
INSTRUCTIONS: dict[str, dict[torch.dtype, tuple[str, ...]]] = {
    "x86_64": {torch.bfloat16: ("amx_bf16", "avx512_bf16"), torch.float16: ("amx_fp16", "avx512_fp16")},
    "aarch64": {torch.bfloat16: ("bf16",)},
}


class Processor(NamedTuple):
    machine: str  # as `platform.machine()` says
    flags: frozenset[str]  # its instruction sets; none where they cannot be known
    library: bool = True  # whether PyTorch has the library that uses them


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def cores() -> int:
    """All that the machine has."""
    return os.cpu_count() or 1


def threads() -> int:
    """The cores this process may use: its affinity, the quota of its control group, and no more than OMP_NUM_THREADS,
    where users and job schedulers set it."""
    found = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores()
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            found = min(found, max(1, round(int(quota) / int(period))))
    except (OSError, ValueError):
        pass
    limit = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()  # further numbers are of nested teams
    return min(found, int(limit)) if limit.isascii() and limit.isdigit() and int(limit) else found


@cache
def processor() -> Processor:
    """The one this runs on. Other systems than Linux tell no flags, and so have float32."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    return Processor(platform.machine(), _flags(text), torch.backends.mkldnn.is_available())


def _flags(cpuinfo: str) -> frozenset[str]:
    """What all its cores have: some processors have cores of two kinds."""
    lines = [line.partition(":") for line in cpuinfo.splitlines()]
    found = [frozenset(flags.split()) for name, _, flags in lines if name.strip() in ("flags", "Features")]
    return frozenset.intersection(*found) if found else frozenset()


def instructions(kind: torch.dtype, processor: Processor) -> str | None:
    """Which of a processor's instruction sets makes a half-precision dtype fast; None: it is slower than float32."""
    wanted = INSTRUCTIONS.get(processor.machine, {}).get(kind, ()) if processor.library else ()
    return next((name for name in wanted if name in processor.flags), None)


def half_is_fast(kind: torch.dtype) -> bool:
    return instructions(kind, processor()) is not None


def dtype(device: torch.device, stored: torch.dtype) -> torch.dtype:
    """The stored dtype where it is fast; float32 where half precision runs slower than that (many CPUs)."""
    if stored == torch.float32 or (device.type == "cpu" and not half_is_fast(stored)):
        return torch.float32
    return stored
