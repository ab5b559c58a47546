"""The best layout to serve with: every division that fits, by output tokens per second under the asked latency."""

from __future__ import annotations

from dataclasses import dataclass

from moesaic.errors import UserError
from moesaic.parallel.layout import ParallelLayout
from moesaic.plan.hardware import Cluster
from moesaic.plan.serving.estimate import ServingPlan, estimate_serving
from moesaic.plan.shape import ModelShape

KEPT = 6


@dataclass(frozen=True)
class Found:
    layout: ParallelLayout
    workers: int
    plan: ServingPlan


def search_serving(
    model: ModelShape,
    cluster: Cluster,
    *,
    prompt: int,
    output: int,
    concurrency: int,
    dtype: str = "bf16",
    backend: str = "typical",
    max_ttft_ms: float | None = None,
    max_tpot_ms: float | None = None,
) -> list[Found]:
    """From the highest throughput on; layouts that miss a latency bound come after all that meet it."""
    found = []
    for layout in _layouts(model, cluster.count):
        workers = cluster.count // layout.devices
        if workers > 1 and layout.dp > 1:
            continue  # the same as more workers
        plan = estimate_serving(
            model, cluster, layout, prompt=prompt, output=output, concurrency=concurrency, dtype=dtype,
            backend=backend, workers=workers,
        )  # fmt: skip
        if plan.fits:
            found.append(Found(layout, workers, plan))
    if not found:
        needed = model.parameters * 2 / (0.85 * cluster.device.memory_bytes)
        raise UserError(
            f"--cluster {cluster.name}",
            f"{model.name} does not fit with a sequence of {prompt + output:,} tokens beside it",
            f"Its weights alone are {model.parameters * 2 / 1e9:,.0f} GB in bf16: take some {needed:.0f} devices or "
            "more, or fewer bits (--dtype fp8).",
        )

    def missed(entry: Found) -> bool:
        plan = entry.plan
        return bool((max_ttft_ms and plan.ttft_ms > max_ttft_ms) or (max_tpot_ms and plan.tpot_ms > max_tpot_ms))

    found.sort(key=lambda entry: (missed(entry), -entry.plan.output_tokens_per_second))
    return found[:KEPT]


def _layouts(model: ModelShape, count: int) -> list[ParallelLayout]:
    heads = min(layer.attention.heads for layer in model.layers)
    sizes = [1, 2, 4, 8, 16, 32, 64]
    layouts = []
    for tp in sizes:
        for dp in sizes:
            for pp in (1, 2, 4):
                if heads % tp or tp * dp * pp > count or pp > len(model.layers):
                    continue
                for ep in sizes if model.experts else [1]:
                    if (tp * dp) % ep == 0 and (ep == 1 or model.experts % ep == 0):
                        layouts.append(ParallelLayout(dp, tp, pp, 1, ep))
    return layouts
