"""Time of one training step under a layout: layers into pipeline stages, what communication stays exposed, the rest.

Nothing is fitted to a single run: the same few constants of a kind of device (`hardware.yaml`) serve every model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from moesaic.errors import UserError
from moesaic.parallel.layout import ParallelLayout
from moesaic.plan.collectives import Group, all_gather, group, reduce_scatter, send
from moesaic.plan.cost import elementwise, matmul
from moesaic.plan.hardware import Cluster, Device
from moesaic.plan.shape import LayerShape, ModelShape
from moesaic.plan.training.layer_cost import HIDDEN_BY, Rank, Seconds, layer_passes, overlaps
from moesaic.plan.training.stages import divide, held_parameters
from moesaic.plan.training.workload import TrainingWork

ADAM_BYTES = 30.0  # per parameter: float32 weight and two moments read and written, gradient read, bf16 weight written
CACHED_PASSES = 4.0  # float32 reads and writes of the logits: softmax, loss, gradient


@dataclass(frozen=True)
class StepTime:
    seconds: float
    compute: float  # of the busiest stage, all micro-batches
    bubble: float  # seconds waiting for the pipeline to fill and drain
    exposed: dict[str, float]  # seconds of communication that nothing hides, by kind
    optimizer: float
    overhead: float
    micro_batch: int
    micro_batches: int
    parts: dict[str, float]  # of compute: matmul, attention, elementwise

    @property
    def exposed_communication(self) -> float:
        return sum(self.exposed.values())


@lru_cache(maxsize=200_000)
def _passes(layer: LayerShape, hidden: int, rank: Rank) -> tuple[Seconds, Seconds]:
    return layer_passes(layer, hidden, rank)


def busy_seconds(model: ModelShape, cluster: Cluster, layout: ParallelLayout, work: TrainingWork) -> float:
    """One micro-batch through the whole model on one rank's shares, all stages together: no step can be shorter than
    this times its micro-batches, divided among the stages."""
    device = cluster.device
    rank = Rank(device, work, layout.mb or 1, layout.tp, layout.cp, layout.ep)
    total = Seconds()
    for layer, count in model.kinds().items():
        forward, backward = _passes(layer, model.hidden, rank)
        total = total + (forward + backward) * count
    if model.parallel_block:
        total = replace(total, tensor=total.tensor / 2)
    return busy(total, device, overlaps(work, device))


def step_time(model: ModelShape, cluster: Cluster, layout: ParallelLayout, work: TrainingWork) -> StepTime:
    """One step. Where the layout does not say, a micro-batch is one sequence."""
    return _step(model, cluster.device, layout, work, layout.mb or 1)


def sequences_per_rank(layout: ParallelLayout, work: TrainingWork) -> int:
    if work.batch % layout.dp:
        near = max(layout.dp, round(work.batch / layout.dp) * layout.dp)
        raise UserError(
            "--batch",
            f"{work.batch} sequences do not divide over dp={layout.dp}",
            f"Nearest that works: --batch {near}.",
        )
    per_rank = work.batch // layout.dp
    if layout.mb and per_rank % layout.mb:
        raise UserError(
            "--layout", f"micro-batches of {layout.mb} do not divide a rank's {per_rank} sequences", "Leave mb out."
        )
    return per_rank


@dataclass(frozen=True)
class StagePasses:
    """One micro-batch through each pipeline rank (all of its chunks), and one message between two of them."""

    forward: list[Seconds]
    backward: list[Seconds]
    transfer: float


def stage_passes(
    model: ModelShape, device: Device, layout: ParallelLayout, work: TrainingWork, size: int
) -> StagePasses:
    rank = Rank(device, work, size, layout.tp, layout.cp, layout.ep)
    forward, backward = [], []
    for stage in divide(model, layout.pp):
        f = b = Seconds()
        for layer, count in stage.items():
            one, two = _passes(layer, model.hidden, rank)
            if model.parallel_block:
                one, two = replace(one, tensor=one.tensor / 2), replace(two, tensor=two.tensor / 2)
            f, b = f + one * count, b + two * count
        forward.append(f)
        backward.append(b)
    embed, head = _embedding(model, rank), _head(model, rank)
    forward[0] = forward[0] + embed
    backward[0] = backward[0] + embed * 2
    forward[-1] = forward[-1] + head[0]
    backward[-1] = backward[-1] + head[1]
    return StagePasses(forward, backward, _pipeline_send(model, rank, layout))


def _step(model: ModelShape, device: Device, layout: ParallelLayout, work: TrainingWork, size: int) -> StepTime:
    hidden_by = overlaps(work, device)
    micro_batches = sequences_per_rank(layout, work) // size
    passes = stage_passes(model, device, layout, work, size)
    whole = [f + b for f, b in zip(passes.forward, passes.backward, strict=True)]

    times = [busy(stage, device, hidden_by) for stage in whole]
    slowest = max(range(len(times)), key=times.__getitem__)
    mean = sum(times) / len(times)
    per_micro = 2 * layout.interleave * passes.transfer
    if "pp" in hidden_by:
        per_micro *= 1 - device.hidden
    bubble_share = 1 / 3 if work.schedule == "zero-bubble" else 1.0
    # Filling and draining: every other stage's share once, in chunks; sends are exposed there in any case.
    bubble = (layout.pp - 1) * (mean / layout.interleave * bubble_share + 2 * passes.transfer) if layout.pp > 1 else 0.0
    steady = micro_batches * times[slowest]
    sends = micro_batches * per_micro if layout.pp > 1 else 0.0

    data, optimizer = _data_parallel(model, device, layout, work)
    if layout.zero == 3:
        gathered = data * (3 if micro_batches else 0) / 2 * micro_batches
        data_exposed = (
            max(gathered - device.hidden * steady, gathered * (1 - device.hidden)) if "dp" in hidden_by else gathered
        )
    elif "dp" in hidden_by:
        last = times[slowest]  # the last micro-batch's backward and the first's forward carry it
        data_exposed = max(data - last, data * (1 - device.hidden))
    else:
        data_exposed = data
    inside = _exposed_by_kind(whole[slowest], device, hidden_by)
    exposed = {kind: seconds * micro_batches for kind, seconds in inside.items()}
    exposed |= {"pipeline": sends, "data": data_exposed}
    overhead = device.step_overhead
    seconds = steady + sends + bubble + data_exposed + optimizer + overhead
    compute = whole[slowest]
    parts = {name: getattr(compute, name) * micro_batches for name in ("matmul", "attention", "elementwise")}
    return StepTime(
        seconds, compute.compute * micro_batches, bubble, exposed, optimizer, overhead, size, micro_batches, parts
    )


def _exposed_by_kind(stage: Seconds, device: Device, hidden_by: frozenset[str]) -> dict[str, float]:
    """Communication inside layers after overlap: `hidden` of it runs behind computation, as far as there is enough."""
    left = stage.compute
    found = {}
    for name, flag in HIDDEN_BY:
        seconds = getattr(stage, name)
        behind = min(device.hidden * seconds, left) if flag in hidden_by else 0.0
        left -= behind
        found[name] = seconds - behind
    return found


def busy(stage: Seconds, device: Device, hidden_by: frozenset[str]) -> float:
    """Seconds in which a rank computes, or waits for communication that nothing hides."""
    return stage.compute + sum(_exposed_by_kind(stage, device, hidden_by).values())


def _embedding(model: ModelShape, rank: Rank) -> Seconds:
    return Seconds(elementwise=elementwise(2 * 3 * rank.tokens / rank.tp * model.hidden, rank.device))


def _head(model: ModelShape, rank: Rank) -> tuple[Seconds, Seconds]:
    tokens, vocab = rank.tokens, model.vocab / rank.tp
    logits = elementwise(4 * CACHED_PASSES / 2 * tokens * vocab, rank.device)
    times = 1 + len(model.mtp)
    dtype = "bf16" if rank.work.dtype in ("fp8", "fp4") else rank.work.dtype
    forward = Seconds(matmul(tokens, vocab, model.hidden, rank.device, dtype), 0.0, logits)
    wide = matmul(tokens, model.hidden, vocab, rank.device, dtype) + matmul(
        vocab, model.hidden, tokens, rank.device, dtype
    )
    return forward * times, Seconds(wide, 0.0, logits) * times


def _pipeline_send(model: ModelShape, rank: Rank, layout: ParallelLayout) -> float:
    device = rank.device
    if layout.pp == 1:
        return 0.0
    # Neighbouring stages are a whole stage's ranks apart; each rank sends its sequence-parallel rows.
    stride = layout.tp * layout.cp * layout.dp
    return send(2 * rank.tokens * model.hidden / layout.tp, stride >= device.domain, device)


def _data_parallel(
    model: ModelShape, device: Device, layout: ParallelLayout, work: TrainingWork
) -> tuple[float, float]:
    """Seconds to reduce gradients and gather parameters, and of the optimizer's own pass, on the fullest stage."""
    plain, expert = max((held_parameters(model, layout, index) for index in range(layout.pp)), key=sum)
    replicas = layout.dp * layout.cp
    among = group(replicas, layout.tp, device)
    # Copies of an expert are whole expert groups apart.
    others = group(layout.expert_dp, layout.ep, device) if layout.expert_dp > 1 else Group(1, 1)
    seconds = 0.0
    for parameters, ranks in ((plain, among), (expert, others)):
        seconds += reduce_scatter(device.reduce_bytes * parameters, ranks, device)
        seconds += all_gather((device.reduce_bytes if layout.zero == 0 else 2) * parameters, ranks, device)
    held = plain / (replicas if layout.zero else 1) + expert / (layout.expert_dp if layout.zero else 1)
    return seconds, elementwise(ADAM_BYTES * held, device) + elementwise(2 * 4 * (plain + expert), device)
