"""VoltanaLLM's frequency control against fixed clocks, simulated on one trace: energy, and who still meets the SLO.

python -m bench.plan_energy            (two minutes on one core)
python -m bench.plan_energy --smoke    (ten seconds)
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace
from typing import Any

from bench.measure import record
from moesaic.parallel.layout import ParallelLayout
from moesaic.plan.energy.clocks import clock_model
from moesaic.plan.energy.compare import compare_clocks
from moesaic.plan.energy.request_trace import Traffic, synthetic_trace
from moesaic.plan.energy.serving import Fleet, Outcome, serve_trace
from moesaic.plan.hardware import load_cluster
from moesaic.plan.models import load_model
from moesaic.plan.serving.engines import load_engine
from moesaic.plan.serving.step import Serving
from moesaic.serve.energy.control import Slo

# Model, device, devices per instance, requests per second, TTFT and TPOT in seconds. The first is the paper's setting.
SETTINGS = (
    ("llama-3-8b", "a100", 1, 12.0, 0.5, 0.045),
    ("llama-3-8b", "a100", 1, 18.0, 0.5, 0.045),
    ("qwen3-30b-a3b", "h200", 1, 20.0, 0.5, 0.040),
    ("qwen3-30b-a3b", "h200", 1, 20.0, 0.25, 0.030),
    ("qwen3-30b-a3b", "h200", 1, 40.0, 0.5, 0.040),
    ("qwen3-32b", "h200", 1, 4.0, 1.0, 0.060),
    ("glm-4.5-air", "h200", 4, 20.0, 0.5, 0.040),
)
SEEDS = (0, 1, 2)


def run(setting: tuple[str, str, int, float, float, float], seconds: float, seed: int) -> list[Outcome]:
    name, device, tp, rate, ttft, tpot = setting
    model, cluster, layout = load_model(name), load_cluster(f"{4 * tp}x{device}"), ParallelLayout(tp=tp)
    traffic, slo = Traffic(seconds, rate, seed=seed), Slo(ttft, tpot)
    outcomes = compare_clocks(model, cluster, layout, traffic, slo, backend="sglang")
    # The paper's controller had two clocks, 71 % and all of the highest.
    serving = Serving(model, cluster.device, layout, load_engine("sglang"), "bf16", "bf16")
    highest = clock_model(cluster.device).highest
    clocks = (round(highest * 1005 / 1410 / 15) * 15.0, highest)
    two = serve_trace(synthetic_trace(traffic), Fleet(serving), slo, "voltana", clocks=clocks, seed=seed)
    return [*outcomes, replace(two, policy="two clocks")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--smoke", action="store_true")
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for setting in SETTINGS[2:3] if given.smoke else SETTINGS:
        model, device, tp, rate, ttft, tpot = setting
        print(f"\n{model}, 2 prefill + 2 decode instances of {tp}x{device}, {rate:.0f} requests/s,", end=" ")
        print(f"TTFT {ttft} s, TPOT {tpot * 1e3:.0f} ms")
        print(f"{'seed':4} {'policy':>10} {'kJ':>7} {'saved':>6} {'SLO':>7} {'TTFT p99':>8} {'TPOT p99':>8}", end=" ")
        print(f"{'prefill MHz':>11} {'decode MHz':>10} {'batch':>5}")
        for seed in SEEDS[:1] if given.smoke else SEEDS:
            outcomes = run(setting, 60.0 if given.smoke else given.seconds, seed)
            for outcome in outcomes:
                saved = 1 - outcome.joules / outcomes[0].joules
                rows.append(
                    {
                        "model": model,
                        "device": device,
                        "tp": tp,
                        "rate": rate,
                        "slo": [ttft, tpot],
                        "seed": seed,
                        "saved": saved,
                        **asdict(outcome),
                    }
                )
                if seed == SEEDS[0] or outcome.policy in {"live", "voltana", "two clocks"}:
                    print(
                        f"{seed:4} {outcome.policy:>10} {outcome.joules / 1e3:7.0f} {saved:6.1%} "
                        f"{outcome.attainment:7.2%} {outcome.ttft_p99:7.3f}s {outcome.tpot_p99 * 1e3:6.1f}ms "
                        f"{outcome.prefill_clock:11.0f} {outcome.decode_clock:10.0f} {outcome.batch:5.0f}"
                    )  # fmt: skip
    if not given.smoke:
        record("plan_energy", rows)


if __name__ == "__main__":
    main()
