"""How many workers should prefill and how many decode: every ratio on a number of devices, by goodput under an SLO.

The closed estimate ranks all ratios in milliseconds; `confirm` then serves a Poisson load with the best of them as
discrete events, since means hide what an SLO is about.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from moesaic.errors import UserError
from moesaic.parallel.layout import ParallelLayout
from moesaic.plan.hardware import Cluster
from moesaic.plan.serving.engines import load_engine
from moesaic.plan.serving.estimate import ServingPlan, estimate_serving
from moesaic.plan.serving.simulate import ServingRun, poisson, simulate_serving
from moesaic.plan.serving.step import Serving
from moesaic.plan.shape import ModelShape

KEPT = 6


@dataclass(frozen=True)
class PrefillDecode:
    """What is divided: a cluster's devices between workers that prefill and workers that decode, for one load."""

    model: ModelShape
    cluster: Cluster
    prefill: ParallelLayout  # of one worker
    decode: ParallelLayout
    prompt: int
    output: int
    dtype: str = "bf16"
    backend: str = "typical"

    def plan(self, before: int, after: int, clients: int) -> ServingPlan:
        """With `before` workers that prefill; without any, the `after` others do both."""
        return estimate_serving(
            self.model, self.cluster, self.decode, prompt=self.prompt, output=self.output, concurrency=clients,
            dtype=self.dtype, backend=self.backend, prefill=self.prefill if before else None, workers=after,
            prefill_workers=max(before, 1),
        )  # fmt: skip


@dataclass(frozen=True)
class Split:
    prefill_workers: int  # 0: every worker does both
    workers: int
    plan: ServingPlan
    concurrency: int  # the highest that keeps the SLO

    @property
    def rate(self) -> float:
        """Output tokens per second and device."""
        return self.plan.tokens_per_second_per_gpu


def search_split(divided: PrefillDecode, max_ttft_ms: float, max_tpot_ms: float) -> list[Split]:
    """Best first. Workers of `decode` that do both stand in the same list."""
    found = []
    count, each = divided.cluster.count, divided.prefill.devices
    for before in range(count // each + 1):
        after = (count - before * each) // divided.decode.devices
        if after < 1:
            break
        if best := _busiest(partial(divided.plan, before, after), max_ttft_ms, max_tpot_ms):
            found.append(Split(before, after, best[1], best[0]))
    if not found:
        raise UserError(
            f"TTFT {max_ttft_ms:g} ms, TPOT {max_tpot_ms:g} ms",
            f"no split of {divided.cluster.name} keeps both even for one request",
            "Allow more time, divide the model over more devices (tp), or take a shorter prompt.",
        )
    return sorted(found, key=lambda split: -split.plan.output_tokens_per_second)[:KEPT]


def _busiest(
    at: Callable[[int], ServingPlan], max_ttft_ms: float, max_tpot_ms: float
) -> tuple[int, ServingPlan] | None:
    """The most clients that keep both bounds: latencies grow with them, so doubling and halving finds it."""

    def keeps(plan: ServingPlan) -> bool:
        return plan.fits and plan.ttft_ms <= max_ttft_ms and plan.tpot_ms <= max_tpot_ms

    low, plan = 1, at(1)
    if not keeps(plan):
        return None
    high = 2
    while high < 1 << 17 and keeps(at(high)):
        low, high = high, high * 2
    while high - low > max(1, low // 50):
        middle = (low + high) // 2
        low, high = (middle, high) if keeps(at(middle)) else (low, middle)
    return low, at(low)


def confirm(split: Split, divided: PrefillDecode, share: float = 0.8, requests: int = 400, seed: int = 0) -> ServingRun:
    """Poisson arrivals at `share` of the split's estimated rate."""
    engine, device, dtype = load_engine(divided.backend), divided.cluster.device, divided.dtype
    after = Serving(divided.model, device, divided.decode, engine, dtype, engine.cache_dtype(dtype))
    before = replace(after, layout=divided.prefill)
    rate = share * split.plan.requests_per_second
    arrivals = poisson(rate, requests, divided.prompt, divided.output, seed, 0.1)
    return simulate_serving(
        after, arrivals, workers=split.workers, prefill=before if split.prefill_workers else None,
        prefill_workers=max(1, split.prefill_workers),
    )  # fmt: skip
