"""What this machine does well: which device, how many threads, which number format. Measured, not looked up."""

from __future__ import annotations

import os
import time
from functools import cache
from pathlib import Path

import torch


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def cores() -> int:
    """All that the machine has."""
    return os.cpu_count() or 1


def threads() -> int:
    """The cores this process may use: its affinity, and the quota of its control group."""
    found = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores()
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            found = min(found, max(1, round(int(quota) / int(period))))
    except (OSError, ValueError):
        pass
    return found


def dtype(device: torch.device, stored: torch.dtype) -> torch.dtype:
    """The stored format where it is fast; float32 where half precision runs slower than that (many CPUs)."""
    if stored == torch.float32 or (device.type == "cpu" and not _half_is_fast(stored)):
        return torch.float32
    return stored


@cache
def _half_is_fast(kind: torch.dtype, size: int = 256) -> bool:
    def seconds(kind: torch.dtype) -> float:
        a = torch.ones(size, size, dtype=kind)
        a @ a
        start = time.perf_counter()
        a @ a
        return time.perf_counter() - start

    return seconds(kind) < 1.5 * seconds(torch.float32)
