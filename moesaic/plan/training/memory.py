"""Bytes on one device: parameters, gradients, optimizer states, activations, buffers, fragmentation; for every layout.

Activations are counted tensor by tensor as autograd keeps them (docs/plan.md has the table), mixtures by the rows that
reach the busiest rank. The fullest pipeline rank counts: the first holds the most micro-batches, the last the logits.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from moesaic.parallel.layout import ParallelLayout
from moesaic.plan.shape import AttentionShape, FfnShape, LayerShape, ModelShape
from moesaic.plan.training.stages import Stage, divide, held_parameters
from moesaic.plan.training.workload import TrainingWork

FRAGMENTATION = 0.04  # of what is allocated and freed each step, lost between blocks
CONTEXT = 1.5e9  # the CUDA context, libraries' workspaces and communicators' buffers
BUCKETS = 2 * 40e6 * 4  # gradients on their way to other ranks


@dataclass(frozen=True)
class TrainingMemory:
    parameters: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    buffers: float
    fragmentation: float

    @property
    def total(self) -> float:
        state = self.parameters + self.gradients + self.optimizer
        return state + self.activations + self.logits + self.buffers + self.fragmentation

    def parts(self) -> dict[str, float]:
        return asdict(self) | {"total": self.total}


def training_memory(
    model: ModelShape, layout: ParallelLayout, work: TrainingWork, micro_batch: int, micro_batches: int
) -> TrainingMemory:
    """Of the fullest rank."""
    stages = divide(model, layout.pp)
    ranks = {
        0,
        len(stages) - 1,
        max(range(len(stages)), key=lambda index: held_parameters(model, layout, index)[1]),
    }
    return max(
        (_stage_memory(model, stages, index, layout, work, micro_batch, micro_batches) for index in ranks),
        key=lambda memory: memory.total,
    )


def _stage_memory(
    model: ModelShape,
    stages: list[Stage],
    index: int,
    layout: ParallelLayout,
    work: TrainingWork,
    size: int,
    count: int,
) -> TrainingMemory:
    plain, expert = held_parameters(model, layout, index)
    copies, expert_copies = layout.dp * layout.cp, layout.expert_dp
    divided = plain / copies + expert / expert_copies
    whole = plain + expert
    width = 4.0 if work.dtype == "fp32" else 2.0
    largest = max(model.layer_parameters(layer) for layer in stages[index] or model.kinds()) / max(layout.tp, layout.ep)
    parameters = width * (divided + 2 * min(largest, whole) if layout.zero == 3 else whole)
    gradients = work.gradient_bytes * (divided if layout.zero >= 2 else whole)
    optimizer = work.optimizer_bytes * (divided if layout.zero >= 1 else whole)

    tokens = size * work.sequence / layout.cp
    flying = in_flight(layout, index, count)
    layers = sum(held for held in stages[index].values())
    each = {layer: activation_bytes(layer, model.hidden, tokens, layout, work) for layer in stages[index]}
    kept = sum(each[layer] * held for layer, held in stages[index].items())
    if work.recompute == "full":
        kept = layers * 2 * tokens * model.hidden / layout.tp
    working = max(each.values(), default=0.0)  # the layer whose gradients are being made, recomputed or not
    activations = kept * flying + working
    last = index == len(stages) - 1
    logits = last * (1 + len(model.mtp)) * tokens * model.vocab / layout.tp * 6.0
    buffers = CONTEXT + min(BUCKETS, work.gradient_bytes * whole)
    if layout.ep > 1:
        most = max(layer.ffn.topk for layer in stages[index]) if stages[index] else 0
        buffers += 2 * 2 * tokens / layout.tp * most * model.hidden * work.imbalance
    return TrainingMemory(
        parameters, gradients, optimizer, activations, logits, buffers, FRAGMENTATION * (activations + logits)
    )


def in_flight(layout: ParallelLayout, index: int, micro_batches: int) -> float:
    """Micro-batches whose activations a pipeline rank holds at once: 1F1B's warm-up, and the extra of interleaving."""
    depth = layout.pp - index
    if layout.interleave > 1:
        chunks = layout.pp * (layout.interleave - 1) + 2 * depth - 1
        return min(chunks / layout.interleave, micro_batches)
    return min(depth, micro_batches)


def activation_bytes(
    layer: LayerShape, hidden: int, tokens: float, layout: ParallelLayout, work: TrainingWork
) -> float:
    """Kept between a layer's forward and backward pass for one micro-batch, on one rank."""
    width = 4.0 if work.dtype == "fp32" else 2.0
    rows = tokens / layout.tp
    return width * (
        _attention_numbers(layer.attention, hidden, rows) + _ffn_numbers(layer.ffn, hidden, rows, tokens, layout, work)
    )


def _attention_numbers(shape: AttentionShape, hidden: int, rows: float) -> float:
    heads = shape.heads
    queries, values = heads * shape.key_size, heads * shape.value_size
    if low := shape.latent:
        # Latents, queries, expanded keys and values, what comes out; the input and its norm.
        latents = (low.q_rank or 0) * 2 + low.kv_rank * 2 + low.rope
        keys = queries + values
        return rows * (2 * hidden + latents + 2 * queries + keys + values)
    keys = shape.kv_heads * (shape.key_size + shape.value_size)
    # The input, its norm; queries and keys before and after rotation, values; the result.
    return rows * (2 * hidden + 2 * queries + 2 * keys + values)


def _ffn_numbers(
    shape: FfnShape, hidden: int, rows: float, tokens: float, layout: ParallelLayout, work: TrainingWork
) -> float:
    between = (3 if shape.gated else 2) * shape.hidden  # gate, up and their product; or before and after the activation
    if not shape.experts:
        return rows * (2 * hidden + between)
    routed = rows * shape.topk * work.imbalance
    shared = rows * (3 if shape.gated else 2) * shape.shared_hidden
    # The input and its norm; rows sorted by expert, what is between, what comes out; float32 scores.
    return rows * (2 * hidden + 2 * shape.experts) + routed * (2 * hidden + between) + shared
