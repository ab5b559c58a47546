"""The best layout for a model and a cluster: every division that fits in memory, by its simulated step time.

A layout may leave devices idle, so that what a smaller cluster can do a larger one can too. Divisions are visited from
the most devices on; one whose matmuls alone would take longer than the best step found so far is not looked at.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from moesaic.errors import UserError
from moesaic.parallel.layout import ParallelLayout
from moesaic.plan.hardware import Cluster
from moesaic.plan.shape import ModelShape
from moesaic.plan.training.estimate import USABLE, TrainingPlan
from moesaic.plan.training.memory import training_memory
from moesaic.plan.training.step_time import busy_seconds, step_time
from moesaic.plan.training.workload import TrainingWork

KEPT = 6
RECOMPUTE = ("none", "selective", "full")


@dataclass(frozen=True)
class SearchResult:
    best: TrainingPlan
    others: list[TrainingPlan]  # runners-up, each of another shape
    tried: int


def search(model: ModelShape, cluster: Cluster, work: TrainingWork, recompute: str | None = None) -> SearchResult:
    """`recompute` None: whatever is fastest of what fits."""
    policies = [replace(work, recompute=policy) for policy in ([recompute] if recompute else RECOMPUTE)]
    best: list[TrainingPlan] = []
    tried = 0
    smallest: tuple[float, ParallelLayout, str] | None = None
    busy: dict[tuple[int, ...], float] = {}
    for layout in _divisions(model, cluster.count, work):
        limit = best[-1].step.seconds if len(best) == KEPT else math.inf
        for index, asked in enumerate(policies):
            fitting = False
            for size in _micro_batches(layout, asked):
                key = (index, layout.tp, layout.cp, layout.ep, size)
                if key not in busy:
                    busy[key] = busy_seconds(model, cluster, replace(layout, mb=size), asked)
                count = work.batch // layout.dp // size
                if busy[key] / layout.pp * count >= limit:
                    continue
                sized = replace(layout, mb=size)
                tried += 1
                memory = training_memory(model, sized, asked, sized.mb, count)
                if memory.total > USABLE * cluster.device.memory_bytes:
                    if smallest is None or memory.total < smallest[0]:
                        smallest = (memory.total, sized, asked.recompute)
                    break  # a larger micro-batch needs more
                fitting = True
                step = step_time(model, cluster, sized, asked)
                if step.seconds < limit:
                    best = _insert(best, TrainingPlan(model, cluster, sized, asked, step, memory))
            if fitting:
                break  # recomputing more is never faster
    if not best:
        _refuse(model, cluster, smallest)
    return SearchResult(best[0], best[1:], tried)


def _micro_batches(layout: ParallelLayout, work: TrainingWork) -> list[int]:
    """Those that divide a rank's sequences and still fill the pipeline, from the smallest on."""
    per_rank = work.batch // layout.dp
    return [
        size
        for size in (1, 2, 4, 8)
        if per_rank % size == 0 and (size == 1 or layout.pp == 1 or per_rank // size >= layout.pp)
    ]


def _insert(best: list[TrainingPlan], plan: TrainingPlan) -> list[TrainingPlan]:
    """Kept in order of time; of layouts that differ only in what is sharded or interleaved, the faster one."""

    def shape(entry: TrainingPlan) -> tuple[int, ...]:
        layout = entry.layout
        return layout.tp, layout.pp, layout.cp, layout.ep, layout.dp

    rivals = [other for other in best if shape(other) == shape(plan)]
    if any(other.step.seconds <= plan.step.seconds for other in rivals):
        return best
    kept = [other for other in best if other not in rivals]
    return sorted([*kept, plan], key=lambda entry: entry.step.seconds)[:KEPT]


def _divisions(model: ModelShape, count: int, work: TrainingWork) -> Iterator[ParallelLayout]:
    heads = min(layer.attention.heads for layer in model.layers)
    layers = len(model.layers)
    batches = [size for size in range(1, min(work.batch, count) + 1) if work.batch % size == 0]
    tensors = [size for size in (1, 2, 4, 8, 16) if heads % size == 0]
    # Below 2,048 tokens a rank, dividing sequences costs more than it brings.
    longest = max(1, work.sequence // 2048)
    contexts = [size for size in (1, 2, 4, 8, 16, 32) if work.sequence % size == 0 and size <= longest]
    halves = {1, 2, 4, 8, 16, 32, 64}
    stages = [size for size in range(1, min(layers, 128) + 1) if size in halves or layers % size == 0]
    choices = [
        (tp * pp * cp * dp, tp, pp, cp, dp)
        for tp in tensors
        for pp in stages
        for cp in contexts
        for dp in batches
        if tp * pp * cp * dp <= count
    ]
    choices.sort(reverse=True)
    for _, tp, pp, cp, dp in choices:
        experts = (
            [
                size
                for size in (1, 2, 4, 8, 16, 32, 64, 128, 256)
                if model.experts % size == 0 and (dp * cp * tp) % size == 0
            ]
            if model.experts
            else [1]
        )
        depth = layers // pp
        chunks = [1] if pp == 1 else [size for size in (1, 2, 3, 4, 6, 8) if size <= depth]
        for ep in experts:
            for interleave in chunks:
                for zero in (1, 3) if pp == 1 else (1,):
                    yield ParallelLayout(dp, tp, pp, cp, ep, interleave, zero)


def _refuse(model: ModelShape, cluster: Cluster, smallest: tuple[float, ParallelLayout, str] | None) -> None:
    device = cluster.device
    if smallest is None:
        raise UserError(
            "--batch", "no division of the batch over this cluster is possible", "Try a batch with more divisors."
        )
    needed, layout, policy = smallest
    state = 16 * model.parameters
    count = max(cluster.count + 1, round(1.15 * state / (USABLE * device.memory_bytes) + 0.5))
    while cluster.count < count and count % min(8, device.domain):
        count += 1
    raise UserError(
        f"--cluster {cluster.name}",
        f"{model.name} does not fit: the leanest layout found ({layout}, recompute {policy}) needs "
        f"{needed / 1e9:,.0f} GB of the {device.memory_bytes / 1e9:,.0f} GB of a device",
        f"Weights, gradients and optimizer states alone are {state / 1e9:,.0f} GB: some {count} of these devices would "
        "hold them.",
    )
