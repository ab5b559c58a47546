"""One training step played event by event: pipeline schedule, messages, gradients, optimizer, stragglers, data loading.

The closed estimate (`training.py`) is what searches use; this is what one looks at: a timeline that becomes a Chrome
trace or a Gantt chart, and in which a slow rank or an uneven micro-batch costs what it really would.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moesaic.plan.timeline.events import Operation, Timeline, simulate
from moesaic.plan.timeline.pipeline import COMPUTE, Pipeline
from moesaic.plan.training.estimate import TrainingPlan
from moesaic.plan.training.layer_cost import overlaps
from moesaic.plan.training.step_time import busy, stage_passes


@dataclass(frozen=True)
class SimulatedStep:
    timeline: Timeline
    seconds: float
    bubble: float  # share of the pipeline ranks' time in which they wait


def simulate_step(
    plan: TrainingPlan,
    slow: Mapping[int, float] | None = None,
    micro_batch_scale: Sequence[float] | None = None,
    loading: float = 0.0,
) -> SimulatedStep:
    """`slow`: pipeline ranks and how many times slower they compute. `micro_batch_scale`: relative work of each
    micro-batch (sequence-length imbalance). `loading`: seconds until the first micro-batch is there."""
    device, layout, work, step = plan.cluster.device, plan.layout, plan.work, plan.step
    hidden_by = overlaps(work, device)
    passes = stage_passes(plan.model, device, layout, work, step.micro_batch)
    factors = [(slow or {}).get(rank, 1.0) for rank in range(layout.pp)]
    chunks = layout.interleave

    def per_chunk(stages: list[float]) -> list[list[float]]:
        return [[seconds * factor / chunks] * chunks for seconds, factor in zip(stages, factors, strict=True)]

    forward = per_chunk([busy(stage, device, hidden_by) for stage in passes.forward])
    backward = per_chunk([busy(stage, device, hidden_by) for stage in passes.backward])
    schedule = "zb-h1" if work.schedule == "zero-bubble" else "interleaved" if chunks > 1 else "1f1b"
    first = [Operation("load data", "data", rank, COMPUTE, loading) for rank in range(layout.pp) if loading > 0]
    pipeline = Pipeline(
        forward, backward, passes.transfer, step.micro_batches, schedule, "pp" in hidden_by, None, micro_batch_scale
    )
    operations = first + pipeline.operations(first_id=len(first))
    # Gradients are reduced when a rank's own backward passes are done; the optimizer waits for all, as its norm does.
    reduced = []
    for rank in range(layout.pp):
        reduced.append(len(operations))
        operations.append(Operation("reduce gradients", "all_reduce", rank, COMPUTE, step.exposed["data"], stage=rank))
    for rank in range(layout.pp):
        after = tuple(reduced)
        seconds = step.optimizer + step.overhead
        operations.append(Operation("optimizer", "optimizer", rank, COMPUTE, seconds, after, stage=rank))
    timeline = simulate(operations)
    busy_seconds = sum(seconds for (_, stream), seconds in timeline.busy().items() if stream == COMPUTE)
    return SimulatedStep(timeline, timeline.makespan, 1 - busy_seconds / (timeline.makespan * layout.pp))
