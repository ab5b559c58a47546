"""A serving plan as JSON and in words."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from moesaic.parallel.layout import ParallelLayout
from moesaic.plan.hardware import Cluster
from moesaic.plan.serving.estimate import ServingPlan
from moesaic.plan.serving.search import Found
from moesaic.plan.shape import ModelShape
from moesaic.plan.text_table import table

GB = 1e9


def serving_json(model: ModelShape, cluster: Cluster, layout: ParallelLayout, plan: ServingPlan) -> dict[str, Any]:
    about = {"model": model.name, "cluster": cluster.name, "layout": str(layout), "parallel": asdict(layout)}
    return about | asdict(plan)


def found_json(model: ModelShape, cluster: Cluster, found: list[Found]) -> dict[str, Any]:
    best = found[0]
    others = [
        {"layout": str(other.layout), "workers": other.workers}
        | {key: getattr(other.plan, key) for key in ("ttft_ms", "tpot_ms", "output_tokens_per_second")}
        for other in found[1:]
    ]
    report = serving_json(model, cluster, best.layout, best.plan)
    return report | {"workers": best.workers, "runners_up": others}


def serving_text(
    model: ModelShape, cluster: Cluster, layout: ParallelLayout, plan: ServingPlan, workers: int = 1
) -> str:
    memory = plan.memory_bytes
    copies = f", {workers} of them" if workers > 1 else ""
    parts = ", ".join(f"{name} {size / GB:,.1f}" for name, size in memory.items() if name != "total")
    limit = f"{cluster.device.memory_bytes / GB:,.0f} GB{'' if plan.fits else ': DOES NOT FIT'}"
    rows = [
        ("model", f"{model.name}, {model.parameters / 1e9:,.4g} B parameters"),
        ("cluster", f"{cluster.name}, {plan.devices} used"),
        ("layout", f"{layout}{copies}"),
        ("load", f"{plan.concurrency:,.0f} requests at once"),
        ("latency", f"TTFT {plan.ttft_ms:,.0f} ms, TPOT {plan.tpot_ms:,.2f} ms"),
        (
            "throughput",
            f"{plan.output_tokens_per_second:,.0f} output tok/s, {plan.requests_per_second:,.2f} requests/s",
        ),
        ("", f"{plan.tokens_per_second_per_gpu:,.1f} output tok/s per device"),
        ("memory", f"{memory['total'] / GB:,.1f} of {limit}"),
        ("", parts),
        ("cost", f"${plan.dollars_per_million_output_tokens:,.2f} per million output tokens"),
    ]
    bounds = f"Decode is bound by {plan.bounds['decode']}, prefill by {plan.bounds['prefill']}."
    room = f"Up to {plan.sequences_that_fit:,} such sequences fit at once."
    error = f"Of measured runs of this kind that were not tuned on, 90 % were within {plan.expected_error:.0%}."
    return table(rows) + f"\n\n{bounds} {room} {error}"


def found_text(model: ModelShape, cluster: Cluster, found: list[Found]) -> str:
    best = found[0]
    rows = [
        (
            f"{other.layout} x {other.workers}",
            f"{other.plan.output_tokens_per_second:,.0f} tok/s",
            f"first token {other.plan.ttft_ms:,.0f} ms, {other.plan.tpot_ms:,.1f} ms per token",
            f"decode bound by {other.plan.bounds['decode']}",
        )
        for other in found[1:]
    ]
    text = serving_text(model, cluster, best.layout, best.plan, best.workers)
    return text + (f"\n\nNext:\n{table(rows)}" if rows else "")
