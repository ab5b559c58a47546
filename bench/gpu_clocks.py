"""Power and time of one GPU against its clock: the measurements behind `moesaic/plan/energy/clocks.py`'s constants.

python -m bench.gpu_clocks            (needs a GPU whose clocks may be locked, as root; they are released at the end)
python -m bench.gpu_clocks --fit      (the constants from the recorded measurements; works anywhere)
python -m bench.gpu_clocks --smoke    (prints what would be measured; works anywhere)
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from bench.measure import RESULTS, record

CLOCKS = (345, 705, 900, 1005, 1095, 1200, 1305, 1410, 1500, 1695, 1980, 0)  # 0: not locked, as the driver likes
WIDTH, LAYERS = 8192, 8  # of decode's matmuls: a gigabyte of weights, far more than the cache
SETTLE = 0.6  # seconds until power and clocks follow a load
BATCHES = (1, 64, 128, 256, 512)


def loads() -> dict[str, Callable[[], object]]:
    """Random numbers, because a GPU that multiplies constants draws less power."""

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * 0.02

    square = random(WIDTH, WIDTH)
    weights = [random(WIDTH, WIDTH) for _ in range(LAYERS)]
    big, other = random(1 << 30), torch.empty(1 << 30, device="cuda", dtype=torch.bfloat16)

    def decode(x_TD: torch.Tensor) -> torch.Tensor:
        for weight in weights:
            x_TD = x_TD @ weight
        return x_TD

    found: dict[str, Callable[[], object]] = {"matmul": lambda: square @ weights[0], "copy": lambda: other.copy_(big)}
    for batch in BATCHES:
        x_TD = random(batch, WIDTH)
        found[f"decode {batch}"] = lambda x_TD=x_TD: decode(x_TD)
    return found


def watts_now(handle: Any, nvml: Any) -> float:
    """Of this moment; what `nvmlDeviceGetPowerUsage` says is the mean of the last second."""
    value = nvml.nvmlDeviceGetFieldValues(handle, [nvml.NVML_FI_DEV_POWER_INSTANT])[0]
    return float(value.value.uiVal) / 1e3


def measure(run: Callable[[], object], handle: Any, nvml: Any, seconds: float, pause: float = 0.0) -> dict[str, float]:
    """`pause`: seconds without work after every batch of runs, as many as the runs took times this."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    repeats = max(1, int(0.02 / (time.perf_counter() - start)))
    clocks: list[int] = []
    watts: list[float] = []
    times: list[float] = []
    settled = time.perf_counter() + SETTLE
    while time.perf_counter() < settled + seconds:
        begin = time.perf_counter()
        for _ in range(repeats):
            run()
        torch.cuda.synchronize()
        took = time.perf_counter() - begin
        resumes = time.perf_counter() + took * pause
        while True:
            if time.perf_counter() > settled:
                watts.append(watts_now(handle, nvml))
                clocks.append(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))
            if time.perf_counter() >= resumes:
                break
            time.sleep(0.002)
        times.append(took / repeats)
    half = len(times) // 2
    return {
        "seconds": statistics.median(times[half:]),
        "watts": statistics.fmean(watts),
        "clock": statistics.median(clocks),
    }


def idle(handle: Any, nvml: Any, seconds: float) -> dict[str, float]:
    time.sleep(3.0)  # cooled down from the load before
    watts = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        watts.append(watts_now(handle, nvml))
        time.sleep(0.05)
    clock = nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)
    return {"seconds": 0.0, "watts": statistics.median(watts), "clock": clock}


def fit(rows: list[dict[str, Any]]) -> None:
    """Least squares over the form of `plan/energy/clocks.py`, first of times, then of idle, then of busy power."""
    import numpy as np
    from scipy.optimize import least_squares

    rows = [row for row in rows if row["asked"] and "third" not in row["load"]]
    best = {row["load"]: min(other["seconds"] for other in rows if other["load"] == row["load"]) for row in rows}
    highest, sustained, peak = 1980.0, 1470.0, 4.8e12
    weights = LAYERS * WIDTH * WIDTH * 2
    share = {"c": 4 * (1 << 30) / best["copy"] / peak, "d": weights / best["decode 1"] / peak, "m": 1.0}
    busy = [row for row in rows if row["load"] != "idle"]

    def parts(row: dict[str, Any]) -> tuple[float, float]:
        if row["load"] == "matmul":
            return best["matmul"], 3 * WIDTH * WIDTH * 2 / peak
        if row["load"] == "copy":
            return 0.0, best["copy"]
        return best["matmul"] * max(16, int(row["load"].split()[1])) / WIDTH * LAYERS, best["decode 1"]

    def seconds(p: Any, row: dict[str, Any]) -> tuple[float, float, float]:
        compute, memory = parts(row)
        compute *= sustained / row["clock"]
        slowed = memory * min(p[2], max(1, (p[0] / row["clock"]) ** p[1]))
        return (compute**4 + slowed**4) ** 0.25, compute, memory * share[row["load"][0]]

    def error(values: Any) -> str:
        return f"median error {np.median(np.abs(values)):.1%}, worst {np.max(np.abs(values)):.1%}"

    times = least_squares(
        lambda p: [np.log(seconds(p, row)[0] / row["seconds"]) for row in busy],
        [1450, 1.2, 2.5], loss="soft_l1", f_scale=0.05, x_scale=[1000, 1, 1],
    ).x  # fmt: skip
    print(f"knee_clock {times[0]:.0f}, exponent {times[1]:.2f}, slowest memory {times[2]:.2f}")
    print("  times:", error([seconds(times, row)[0] / row["seconds"] - 1 for row in busy]))
    resting = [row for row in rows if row["load"] == "idle"]
    idling = least_squares(
        lambda p: [np.log((p[0] + p[1] * (row["clock"] / highest) ** p[2]) / row["watts"]) for row in resting],
        [80, 50, 2],
    ).x
    print(f"idle_power {idling[0]:.0f}, clock_idle_power {idling[1]:.0f}, exponent {idling[2]:.1f}")

    def watts(p: Any, row: dict[str, Any]) -> float:
        total, compute, memory = seconds(times, row)
        x = row["clock"] / highest
        cores = p[0] * (x + p[2] * x**3) / (1 + p[2]) * compute / total
        return (
            idling[0]
            + idling[1] * x ** idling[2]
            + cores
            + p[1] * max(1, row["clock"] / times[0]) ** p[3] * memory / total
        )

    free = [row for row in busy if row["watts"] < 690]  # not held down by the power limit
    power = least_squares(  # prefill is like the large matmul: it counts as much as the five decode batches together
        lambda p: [(3 if row["load"] == "matmul" else 1) * np.log(watts(p, row) / row["watts"]) for row in free],
        [900, 400, 0.8, 0.7], loss="soft_l1", f_scale=0.1, x_scale=[100, 100, 1, 1],
    ).x  # fmt: skip
    print(f"core_power {power[0]:.0f}, memory_power {power[1]:.0f}", end=", ")
    print(f"voltage {power[2]:.2f}, memory exponent {power[3]:.2f}")
    print("  power:", error([watts(power, row) / row["watts"] - 1 for row in free]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1.3)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--fit", action="store_true")
    given = parser.parse_args()
    if given.fit:
        fit(json.loads((RESULTS / "gpu_clocks.json").read_text())["rows"])
        return
    if given.smoke:
        print(f"{len(CLOCKS)} clocks x (matmul, copy, {len(BATCHES)} decode batches, idle)")
        return
    import pynvml as nvml

    nvml.nvmlInit()
    handle = nvml.nvmlDeviceGetHandleByIndex(0)
    rows: list[dict[str, Any]] = []
    try:
        runs = loads()
        for clock in CLOCKS:
            begin = time.perf_counter()
            if clock:
                nvml.nvmlDeviceSetGpuLockedClocks(handle, clock, clock)
            else:
                nvml.nvmlDeviceResetGpuLockedClocks(handle)
            setting = time.perf_counter() - begin
            rows.append({"asked": clock, "load": "idle", "set_seconds": setting, **idle(handle, nvml, given.seconds)})
            for name, run in runs.items():
                rows.append({"asked": clock, "load": name, **measure(run, handle, nvml, given.seconds)})
            third = measure(runs["decode 64"], handle, nvml, given.seconds, pause=2.0)
            rows.append({"asked": clock, "load": "decode 64, a third of the time", **third})
            for row in rows[-len(runs) - 2 :]:
                print({key: round(value, 7) if isinstance(value, float) else value for key, value in row.items()})
    finally:
        nvml.nvmlDeviceResetGpuLockedClocks(handle)
    record("gpu_clocks", rows)


if __name__ == "__main__":
    main()
