"""Attention and experts on separate devices, in serving (MegaScale-Infer) and in training (DisagMoE): who wins when.

python -m bench.plan_disaggregation            (a minute on one core)
python -m bench.plan_disaggregation --smoke    (seconds)
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from bench.measure import record
from moesaic.plan.disaggregation.colocated import plan_colocated, plan_tensor_parallel
from moesaic.plan.disaggregation.decode_parts import DecodePlan, Decoding
from moesaic.plan.disaggregation.disagmoe import af_pipe, compare
from moesaic.plan.disaggregation.megascale_infer import compare_decoding, ping_pong, plan_disaggregated, search_split
from moesaic.plan.hardware import Cluster, load_cluster, load_device
from moesaic.plan.models import load_model

SERVING = (
    ("mixtral-8x22b", "a100", 32, "bf16"),
    ("qwen3-235b-a22b", "h800", 32, "bf16"),
    ("glm-4.5", "h800", 48, "bf16"),
    ("deepseek-v3", "h800", 32, "bf16"),
    ("deepseek-v3", "h800", 64, "bf16"),
    ("kimi-k2", "h800", 128, "fp8"),
    ("qwen3-30b-a3b", "h800", 8, "bf16"),
)
CONTEXTS = (700, 2000, 8000)
PAIRS = (("h20", "h20"), ("l40s", "l40s"), ("h20", "l40s"), ("l40s", "h20"), ("h20", "h800"), ("h800", "h800"))
TRAINING = ("deepseek-v3", "qwen3-235b-a22b", "gpt-oss-120b", "glm-4.5", "mixtral-8x22b")
TPOT = 0.15


def rate(plan: DecodePlan | None) -> float:
    return plan.tokens_per_second_per_device if plan else 0.0


def serving(rows: list[dict[str, Any]], smoke: bool) -> None:
    print(f"Tokens per second per device at {TPOT * 1e3:.0f} ms per token")
    heads = ("tensor parallel", "wide EP", "EP overlapped", "disaggregated")
    print(f"{'model':17} {'devices':>9} {'context':>7} " + " ".join(f"{head:>15}" for head in heads), end="")
    print(f" {'over TP':>7} {'over EP':>7}  split, micro-batches, events over formula")
    for name, device, count, dtype in SERVING[1:2] if smoke else SERVING:
        model = load_model(name)
        for context in CONTEXTS[:1] if smoke else CONTEXTS:
            plans = compare_decoding(
                model, Cluster(load_device(device), count), Decoding(context=context, tpot=TPOT, dtype=dtype)
            )
            rates = {kind: rate(plan) for kind, plan in plans.items()}
            apart = plans["disaggregated"]
            wide = max(rates["expert parallel"], rates["overlapped"])
            over = [
                rates["disaggregated"] / other if other else float("nan") for other in (rates["tensor parallel"], wide)
            ]
            events = agreement(apart, len(model.layers)) if apart else float("nan")
            print(f"{name:17} {count:4}x{device:>4} {context:7} ", end="")
            print(" ".join(f"{value:15,.0f}" for value in rates.values()), end="")
            print(f" {over[0]:6.2f}x {over[1]:6.2f}x", end="  ")
            print(
                f"{apart.attention}+{apart.experts} m={apart.micro_batches} {events:.3f}" if apart else "does not fit"
            )
            rows.append({"part": "serving", "model": name, "device": device, "count": count, "dtype": dtype,
                         "context": context, **rates, "events_over_formula": events})  # fmt: skip


def agreement(plan: DecodePlan, layers: int) -> float:
    """Ten steps of the pipeline played event by event, over the formula; of the layers with experts."""
    busy = max(plan.attention_seconds, plan.expert_seconds, plan.message_seconds) * plan.micro_batches
    formula = max(busy, plan.attention_seconds + plan.expert_seconds + 2 * plan.message_seconds)
    return ping_pong(plan, layers, 10).makespan / (10 * layers * formula)


def crossings(rows: list[dict[str, Any]]) -> None:
    model, device = load_model("qwen3-235b-a22b"), load_device("h800")
    print("\nqwen3-235b-a22b on 32xh800, context 2000: sequences under way from which disaggregation wins")
    for batch in (32, 64, 128, 256, 512, 1024, 1472, 2048, 3072):
        cluster, asked = Cluster(device, 32), Decoding(context=2000, tpot=1.0, batch=batch)
        nodes = plan_tensor_parallel(model, cluster, asked)
        apart = max(
            (plan_disaggregated(model, Cluster(device, n), Cluster(device, 32 - n), asked) for n in range(2, 32, 2)),
            key=rate,
        )
        wide = plan_colocated(model, cluster, asked)
        print(f"  {batch:5} TP {rate(nodes):7.0f}  wide EP {rate(wide):7.0f}  disaggregated {rate(apart):7.0f}")
        rows.append({"part": "batch", "batch": batch, "nodes": rate(nodes), "wide": rate(wide), "apart": rate(apart)})
    print("  bandwidth between nodes, GB/s per device (best batch):")
    for network in (3, 6, 12, 25, 50, 100, 200, 400):
        other = replace(device, network=network * 1e9, name=f"h800-{network}")
        rates = {
            kind: rate(plan)
            for kind, plan in compare_decoding(model, Cluster(other, 32), Decoding(context=2000, tpot=TPOT)).items()
        }
        print(f"  {network:5} " + "  ".join(f"{kind} {value:7.0f}" for kind, value in rates.items()))
        rows.append({"part": "network", "network": network * 1e9, **rates})


def prices(rows: list[dict[str, Any]], smoke: bool) -> None:
    print("\nMillion tokens per dollar, 64 devices, context 730: attention on, experts on")
    for name in ("mixtral-8x22b",) if smoke else ("mixtral-8x22b", "qwen3-235b-a22b"):
        model = load_model(name)
        for attention, experts in PAIRS:
            one, other = load_device(attention), load_device(experts)
            apart = search_split(model, one, other, 64, Decoding(context=730, tpot=TPOT), per_dollar=True)
            values = {"apart": apart.tokens_per_dollar / 1e6 if apart else 0.0}
            if attention == experts:
                found = compare_decoding(model, Cluster(one, 64), Decoding(context=730, tpot=TPOT))
                values |= {
                    kind: plan.tokens_per_dollar / 1e6
                    for kind, plan in found.items()
                    if plan and kind != "disaggregated"
                }
            print(f"  {name:16} {attention:>5} {experts:>5} " + "  ".join(f"{k} {v:5.2f}" for k, v in values.items()))
            rows.append({"part": "dollars", "model": name, "attention": attention, "experts": experts, **values})


def training(rows: list[dict[str, Any]], smoke: bool) -> None:
    print("\nDisagMoE on 128xH800: step time of the others over its own; with filling, 32 micro-batches in 8 layers")
    print(
        f"{'model':17} {'sequence':>8} {'ep':>4} {'exposed':>8} {'experts':>8} {'all':>6} {'filled':>7}  split, bound"
    )
    for name in TRAINING[:1] if smoke else TRAINING:
        model = load_model(name)
        for sequence in (4096, 8192, 32768):
            for ep in sorted({min(ep, model.experts) for ep in (16, 64, 128)}):
                plans = compare(model, load_cluster("128xH800"), sequence=sequence, ep=ep)
                own = plans.pop("disaggregated")
                over = {kind: plan.seconds / own.seconds for kind, plan in plans.items()}
                filled = af_pipe(own, 8, 32) / (8 * 32 * own.seconds)
                print(f"{name:17} {sequence:8} {own.devices:4} ", end="")
                print(" ".join(f"{value:7.2f}x" for value in over.values()), end="")
                print(f" {filled:6.3f}  {own.attention}+{own.experts} {own.bound}")
                rows.append({"part": "training", "model": name, "sequence": sequence, "ep": own.devices, **over,
                             "filled": filled, "attention": own.attention, "bound": own.bound})  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true")
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    serving(rows, given.smoke)
    if not given.smoke:
        crossings(rows)
    prices(rows, given.smoke)
    training(rows, given.smoke)
    if not given.smoke:
        record("plan_disaggregation", rows)


if __name__ == "__main__":
    main()
