"""Fits the serving constants of `hardware.yaml` and `engines.yaml` to the tuning half of the measured runs.

    python -m bench.plan_serving_tune --rows 800 --rounds 7      some minutes of one core; prints what to write there

Six constants for each of two generations of devices (Hopper, Blackwell), six for each engine (vLLM's share of prefill
beside decode is one more) and six for all. Least squares in the logarithm of output tokens per second, and with a
fifth of the weight of TTFT, robust against outliers (soft L1 at 10 %), each run counted once. A weak pull towards the
starting values (15 % of a residual per e-fold) settles what the runs leave open.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from bench.plan_serving_rows import Case, find_table, output_rate, read_cases
from moesaic.plan.hardware import Device, load_device
from moesaic.plan.models import load_model
from moesaic.plan.serving import step
from moesaic.plan.serving.engines import Engine, engines
from moesaic.plan.serving.estimate import Load
from moesaic.plan.serving.memory import weight_bytes
from moesaic.plan.serving.step import Serving

GENERATIONS = {"hopper": ("h100", "h200"), "blackwell": ("b200", "b300", "gb200", "gb300")}
# Start and bounds. What a device has:
DEVICE = {"serve_memory": (0.7, 0.3, 0.98), "serve_compute": (0.5, 0.1, 0.95), "serve_attention": (0.6, 0.1, 1.0),
          "serve_kernel": (2.5e-6, 5e-7, 2e-5), "serve_reduce": (1e-5, 1e-6, 6e-5),
          "serve_link": (0.6, 0.05, 0.95)}  # fmt: skip
ENGINE = {"sequence": (4e-6, 1e-7, 1e-4), "kernels": (1.0, 0.3, 3.0), "experts": (0.6, 0.15, 1.4),
          "eager": (1e-5, 1e-6, 6e-5), "first": (2e-2, 1e-3, 6e-2), "bunching": (0.2, 0.01, 0.9)}  # fmt: skip
MIXED = (0.3, 0.001, 0.9)
EVERYWHERE = {"latent": (9.0, 4.0, 20.0), "experts": (7.0, 3.0, 14.0), "IMBALANCE": (1.2, 1.0, 1.6),
              "VARIETY": (0.9, 0.3, 1.0), "WIDENED": (0.8, 0.4, 1.0), "NARROW": (0.5, 0.2, 1.0)}  # fmt: skip
PULL = 0.15
Key = tuple[str, str]


def parameters() -> dict[Key, tuple[float, float, float]]:
    made = {("everywhere", name): bounds for name, bounds in EVERYWHERE.items()}
    made |= {(group, name): bounds for group in GENERATIONS for name, bounds in DEVICE.items()}
    made |= {(engine, name): bounds for engine in ("vllm", "sglang", "trtllm") for name, bounds in ENGINE.items()}
    return made | {("vllm", "mixed"): MIXED}


def apply(values: dict[Key, float]) -> tuple[dict[str, Device], dict[str, Engine]]:
    """Devices and engines with these constants; those of all are set where they stand."""
    step.KERNELS["latent"] = values["everywhere", "latent"]
    step.KERNELS["experts"] = values["everywhere", "experts"]
    for name in ("IMBALANCE", "VARIETY", "WIDENED", "NARROW"):
        setattr(step, name, values["everywhere", name])
    devices: dict[str, Device] = {}
    changed: dict[str, Engine] = {}
    for group, members in GENERATIONS.items():
        own: dict[str, Any] = {key: values[group, key] for key in DEVICE}
        devices |= {name: replace(load_device(name), **own) for name in members}
    for name in ("vllm", "sglang", "trtllm"):
        own = {key: value for (group, key), value in values.items() if group == name}
        changed[name] = replace(engines()[name], **own)
    return devices, changed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=Path, help="silicon_sample.csv of aiconfigurator-core")
    parser.add_argument("--rows", type=int, default=800, help="of the tuning half, drawn at random")
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    file = given.table or find_table()
    if file is None:
        raise SystemExit("pip install aiconfigurator-core, or give --table silicon_sample.csv of that package")
    models = {name: load_model(name) for name in {row.model for row in read_cases(file) if isinstance(row, Case)}}
    once = {(row.ttft_ms, row.tpot_ms): row for row in read_cases(file) if isinstance(row, Case) and row.tuned_on}
    cases = random.Random(0).sample(list(once.values()), min(given.rows, len(once)))
    wanted = parameters()
    start, low, high = (np.array([bounds[index] for bounds in wanted.values()]) for index in range(3))

    def serving(case: Case, devices: dict[str, Device], changed: dict[str, Engine]) -> Serving:
        engine = changed[case.backend]
        return Serving(models[case.model], devices[case.system], case.layout, engine, case.dtype,
                       engine.cache_dtype(case.dtype))  # fmt: skip

    first_devices, first_engines = apply(dict(zip(wanted, start, strict=True)))
    cases = [  # some rows name fewer devices than the weights need
        case for case in cases
        if weight_bytes(serving(case, first_devices, first_engines)) < first_devices[case.system].memory_bytes
    ]  # fmt: skip

    def values_at(point: np.ndarray) -> np.ndarray:
        return low * (high / low) ** (1 / (1 + np.exp(-point)))

    def residuals(point: np.ndarray) -> np.ndarray:
        values = values_at(point)
        devices, changed = apply(dict(zip(wanted, values, strict=True)))
        rates, firsts = [], []
        for case in cases:
            after = serving(case, devices, changed)
            before = replace(after, layout=case.prefill) if case.prefill else after
            load = Load(after, before, case.prompt, case.output, 0.0, case.workers, case.prefill_workers,
                        case.prefill is not None, 1.0)  # fmt: skip
            ttft, tpot, _ = load.latency(case.concurrency)
            rate = output_rate(case.concurrency, case.output, ttft * 1e3, tpot * 1e3)
            rates.append(np.log(rate / case.throughput))
            firsts.append(np.clip(0.2 * np.log(ttft * 1e3 / case.ttft_ms), -0.4, 0.4))
        return np.concatenate([rates, firsts, PULL * np.log(values / start)])

    share = np.clip(np.log(start / low) / np.log(high / low), 0.02, 0.98)
    found = least_squares(
        residuals, np.log(share / (1 - share)), loss="soft_l1", f_scale=0.1, max_nfev=given.rounds, diff_step=1e-2
    )
    for (group, name), value in zip(wanted, values_at(found.x), strict=True):
        print(f"{group:12} {name:18} {value:.4g}")
    errors = np.abs(np.exp(residuals(found.x)[: len(cases)]) - 1)
    print(f"{len(cases)} rows: median error {np.median(errors):.1%}, 90 % within {np.quantile(errors, 0.9):.1%}")


if __name__ == "__main__":
    main()
