"""What clocks cost a cluster that serves: one trace at fixed clocks and under VoltanaLLM's control, side by side.

    outcomes = compare_clocks(load_model("qwen3-30b-a3b"), load_cluster("4xH200"), ParallelLayout(),
                              Traffic(seconds=600, rate=20), Slo(ttft=0.5, tpot=0.04))

The first outcome is the highest clock held all the time; `saved` compares the others with it.
"""

from __future__ import annotations

from collections.abc import Sequence

from moesaic.errors import UserError
from moesaic.parallel.layout import ParallelLayout
from moesaic.plan.energy.request_trace import Traffic, synthetic_trace
from moesaic.plan.energy.serving import Fleet, Outcome, serve_trace
from moesaic.plan.energy.step import Pricing
from moesaic.plan.hardware import Cluster
from moesaic.plan.serving.engines import load_engine
from moesaic.plan.serving.step import Serving
from moesaic.plan.shape import ModelShape
from moesaic.serve.energy.control import Slo

FIXED = (0.85, 0.75, 0.65, 0.55, 0.45)  # shares of the highest clock
STEP = 15.0


def compare_clocks(
    model: ModelShape,
    cluster: Cluster,
    layout: ParallelLayout,
    traffic: Traffic,
    slo: Slo,
    *,
    prefill: int | None = None,
    dtype: str = "bf16",
    cache_dtype: str = "bf16",
    backend: str = "moesaic",
    fixed: Sequence[float] = FIXED,
) -> list[Outcome]:
    """Instances of `layout` fill the cluster; `prefill` of them prefill (None: half), the others decode. Policies: the
    highest clock, `fixed` shares of it, the server's own control, control with profiles and round-robin routing, and
    VoltanaLLM whole."""
    instances = cluster.count // layout.devices
    first = instances // 2 if prefill is None else prefill
    if not 0 < first < instances:
        raise UserError(
            f"--cluster {cluster.name}",
            f"{layout} makes {instances} instances of it: prefill and decode need one each at least",
            f"Take {2 * layout.devices} devices or more.",
        )
    serving = Serving(model, cluster.device, layout, load_engine(backend), dtype, cache_dtype)
    fleet, pricing = Fleet(serving, first, instances - first), Pricing(serving)
    trace = synthetic_trace(traffic)
    highest = pricing.model.highest
    policies: list[str | float] = [highest, *(round(highest * share / STEP) * STEP for share in fixed)]
    policies += ["live", "control", "voltana"]
    return [serve_trace(trace, fleet, slo, policy, seed=traffic.seed, pricing=pricing) for policy in policies]


def saved(outcome: Outcome, reference: Outcome) -> float:
    """Share of the reference's energy, for the same requests."""
    return 1 - outcome.joules / reference.joules
