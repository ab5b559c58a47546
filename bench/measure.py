"""Timing two things fairly: turn about, after a warm-up, medians; and a record of where and when."""

from __future__ import annotations

import json
import platform
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def side_by_side(runs: dict[str, Callable[[], object]], seconds: float = 4.0, least: int = 5) -> dict[str, float]:
    """Median seconds of each, alternating so that a noisy moment hits all alike."""
    for run in runs.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in runs}
    end = time.perf_counter() + seconds * len(runs)
    while time.perf_counter() < end or min(map(len, times.values())) < least:
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(all_times) for name, all_times in times.items()}


def machine() -> dict[str, Any]:
    cpu = platform.processor() or platform.machine()
    if shutil.which("lscpu"):  # /proc/cpuinfo has no name on ARM
        lines = subprocess.run(["lscpu"], capture_output=True, text=True).stdout.splitlines()
        cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("Model name")), cpu)
    return {
        "cpu": cpu,
        "cores": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }


def record(name: str, rows: list[dict[str, Any]], **facts: Any) -> Path:
    RESULTS.mkdir(exist_ok=True)
    file = RESULTS / f"{name}.json"
    file.write_text(json.dumps({"bench": name, "machine": machine(), **facts, "rows": rows}, indent=1) + "\n")
    return file
