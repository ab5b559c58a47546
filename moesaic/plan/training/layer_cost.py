"""Seconds of one layer's forward and backward pass on one rank, part by part, for one micro-batch of a training step.

Every matmul appears with its true sizes under the layout, so a narrow shard or a small expert is as slow as it is.
Bytes of elementwise work are counted as fused kernels move them (each tensor read and written once per fused group).
"""

from __future__ import annotations

from dataclasses import dataclass

from moesaic.plan.collectives import all_gather, expert_exchange, group, reduce_scatter
from moesaic.plan.cost import attention as attention_seconds
from moesaic.plan.cost import elementwise, matmul
from moesaic.plan.hardware import Device
from moesaic.plan.shape import AttentionShape, FfnShape, LayerShape, attended
from moesaic.plan.training.workload import TrainingWork

ATTENTION_BACKWARD = 2.5  # five matmuls where the forward pass has two
SCORE_BYTES = 13.0  # per score, forward, unfused: written, softmax and dropout in and out with its mask, read
NORM_PASSES = 6.0  # reads and writes of a token's row per norm, residual and dropout, forward
ACTIVATION_PASSES = 3.0
# Kinds of communication inside a layer, and what a work's `overlap` calls those that computation hides.
HIDDEN_BY = (("tensor", "tp"), ("context", "tp"), ("experts", "ep"))
UNFUSED_PASSES = 24.0  # bias, clamp, sigmoid and products one by one, in and out each


@dataclass(frozen=True)
class Seconds:
    """One pass by part. Communication is listed apart, so that what is hidden can be taken off."""

    matmul: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    tensor: float = 0.0  # tensor-parallel collectives
    context: float = 0.0
    experts: float = 0.0  # dispatch and combine

    @property
    def compute(self) -> float:
        return self.matmul + self.attention + self.elementwise

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(
            self.matmul + other.matmul,
            self.attention + other.attention,
            self.elementwise + other.elementwise,
            self.tensor + other.tensor,
            self.context + other.context,
            self.experts + other.experts,
        )

    def __mul__(self, factor: float) -> Seconds:
        return Seconds(
            self.matmul * factor,
            self.attention * factor,
            self.elementwise * factor,
            self.tensor * factor,
            self.context * factor,
            self.experts * factor,
        )


@dataclass(frozen=True)
class Rank:
    """One rank's share of a micro-batch: its tokens and the groups it talks to."""

    device: Device
    work: TrainingWork
    micro_batch: int
    tp: int
    cp: int
    ep: int

    def __hash__(self) -> int:
        return hash((self.device, self.micro_batch, self.tp, self.cp, self.ep, self.work.recompute, self.work.dtype))

    @property
    def fused(self) -> bool:
        return self.device.fused_attention if self.work.fused_attention is None else self.work.fused_attention

    @property
    def tokens(self) -> float:
        """Of its sequences, after context parallelism; tensor-parallel ranks all compute on these."""
        return self.micro_batch * self.work.sequence / self.cp


def overlaps(work: TrainingWork, device: Device) -> frozenset[str]:
    return frozenset(device.overlap) if work.overlap is None else work.overlap


def layer_passes(layer: LayerShape, hidden: int, rank: Rank) -> tuple[Seconds, Seconds]:
    """Forward and backward, recomputation included in the backward."""
    forward_attention, backward_attention, core = _attention(layer.attention, hidden, rank)
    forward_ffn, backward_ffn = _ffn(layer.ffn, hidden, rank)
    forward = forward_attention + forward_ffn
    backward = backward_attention + backward_ffn
    if rank.work.recompute == "full":
        backward = backward + forward
    elif rank.work.recompute == "selective":
        backward = backward + Seconds(attention=core)
    if layer.ffn.experts:
        # Where the device is done before the host has launched the next kernels, it waits for the host. What is hidden
        # behind computation passes no time meanwhile.
        both, behind = forward + backward, overlaps(rank.work, rank.device)
        passing = [getattr(both, name) * (1 - rank.device.hidden * (flag in behind)) for name, flag in HIDDEN_BY]
        wait = rank.device.mixture_launch - both.compute - sum(passing)
        backward = backward + Seconds(elementwise=max(0.0, wait))
    return forward, backward


def _both(m: float, n: float, k: float, rank: Rank, count: float = 1.0) -> tuple[float, float]:
    """A matmul forward, and its two backward: for the input and for the weight."""
    device, dtype = rank.device, rank.work.dtype
    forward = matmul(m, n, k, device, dtype, count)
    backward = matmul(m, k, n, device, dtype, count) + matmul(k, n, m, device, dtype, count)
    if dtype in ("fp8", "fp4"):  # inputs, weights and output gradients are cast and scaled before each matmul
        cast = count * 3.0 * (m * k + n * k / 4) / (device.bandwidth * device.memory)
        forward, backward = forward + cast, backward + 2 * cast
    return forward, backward


def _attention(shape: AttentionShape, hidden: int, rank: Rank) -> tuple[Seconds, Seconds, float]:
    device, tp, tokens = rank.device, rank.tp, rank.tokens
    heads, key, value = shape.heads / tp, shape.key_size, shape.value_size
    kv_heads = max(1.0, shape.kv_heads / tp)
    pairs: list[tuple[float, float]] = []
    rows = tokens / tp
    if low := shape.latent:
        plain = key - low.rope
        queries = heads * key
        if low.q_rank:
            pairs += [_both(rows, low.q_rank, hidden, rank), _both(tokens, queries, low.q_rank, rank)]
        else:
            pairs.append(_both(tokens, queries, hidden, rank))
        pairs.append(_both(rows, low.kv_rank + low.rope, hidden, rank))
        pairs.append(_both(tokens, heads * (plain + value), low.kv_rank, rank))
        kv_heads = heads
        if shape.topk:
            pairs.append(_both(tokens, shape.index_heads * shape.index_size, low.q_rank or hidden, rank))
    else:
        pairs.append(_both(tokens, heads * key + kv_heads * (key + value), hidden, rank))
    pairs.append(_both(tokens, hidden, heads * value, rank))
    matmuls = (sum(pair[0] for pair in pairs), sum(pair[1] for pair in pairs))

    core, core_back = _fused_core(shape, heads, kv_heads, rank) if rank.fused else _unfused_core(shape, heads, rank)

    # Norm, residual and dropout on sequence-parallel rows; rotary and layout changes on the heads.
    streamed = 2 * (NORM_PASSES * rows * hidden + 2 * tokens * (heads * key + kv_heads * (key + value)))
    forward = Seconds(matmuls[0], core, elementwise(streamed, device), _tensor(hidden, rank), _context(shape, rank))
    backward = Seconds(
        matmuls[1], core_back, elementwise(1.5 * streamed, device), 1.5 * forward.tensor, 2 * forward.context
    )
    return forward, backward, core


def _fused_core(shape: AttentionShape, heads: float, kv_heads: float, rank: Rank) -> tuple[float, float]:
    """Scores stay on the chip, and what no token may see is skipped."""
    device, width = rank.device, shape.key_size + shape.value_size
    flops = 2 * rank.tokens * heads * width * attended(shape, rank.work.sequence)
    moved = 2 * rank.tokens * (heads + kv_heads) * width
    core = attention_seconds(flops, moved, device, width / 2)
    back = attention_seconds(ATTENTION_BACKWARD * flops, 2.5 * moved, device, width / 2)
    if shape.topk:  # the indexer scores every pair of tokens
        scores = 2 * rank.tokens * shape.index_heads * shape.index_size * rank.work.sequence / 2
        indexer = attention_seconds(scores, moved / 4, device, shape.index_size)
        return core + indexer, back + 2 * indexer
    return core, back


def _unfused_core(shape: AttentionShape, heads: float, rank: Rank) -> tuple[float, float]:
    """As before FlashAttention: the whole square of scores is written, normalised, dropped out and read again."""
    device, length = rank.device, rank.work.sequence
    count = heads * rank.micro_batch
    scores = matmul(length / rank.cp, length, shape.key_size, device, "bf16", count)
    values = matmul(length / rank.cp, shape.value_size, length, device, "bf16", count)
    square = elementwise(SCORE_BYTES * rank.tokens * length * heads, device)
    return scores + values + square, 2 * (scores + values + square)


def _ffn(shape: FfnShape, hidden: int, rank: Rank) -> tuple[Seconds, Seconds]:
    device, tp, tokens = rank.device, rank.tp, rank.tokens
    wide = 2 if shape.gated else 1
    rows = tokens / tp
    norm = 2 * NORM_PASSES * rows * hidden
    if not shape.experts:
        up, down = _both(tokens, wide * shape.hidden / tp, hidden, rank), _both(tokens, hidden, shape.hidden / tp, rank)
        streamed = norm + 2 * ACTIVATION_PASSES * tokens * shape.hidden / tp
        forward = Seconds(up[0] + down[0], 0.0, elementwise(streamed, device), _tensor(hidden, rank))
        return forward, Seconds(up[1] + down[1], 0.0, elementwise(2 * streamed, device), 1.5 * forward.tensor)

    # Experts: each rank's own tokens (already divided by sequence parallelism) travel to the ranks of their experts.
    shared_tokens = rows * rank.ep  # that one set of experts sees
    own = shape.experts / rank.ep
    per_expert = shared_tokens * shape.topk / shape.experts * rank.work.imbalance
    up = _both(per_expert, wide * shape.hidden, hidden, rank, own)
    down = _both(per_expert, hidden, shape.hidden, rank, own)
    router = _both(rows, shape.experts, hidden, rank)
    matmuls = [up[0] + down[0] + router[0], up[1] + down[1] + router[1]]
    if shape.shared_hidden:
        first = _both(tokens, wide * shape.shared_hidden / tp, hidden, rank)
        second = _both(tokens, hidden, shape.shared_hidden / tp, rank)
        matmuls = [matmuls[0] + first[0] + second[0], matmuls[1] + first[1] + second[1]]
    # Rows are permuted to their experts and back (read and written each way), activations between the matmuls, the
    # router's float32 scores.
    routed = rows * shape.topk * rank.work.imbalance
    moved = norm + 2 * routed * (4 * hidden + ACTIVATION_PASSES * shape.hidden) + 12 * rows * shape.experts
    moved += 2 * ACTIVATION_PASSES * tokens * shape.shared_hidden / tp
    if shape.biased:
        moved += 2 * UNFUSED_PASSES * routed * wide * shape.hidden
    spread = group(rank.ep, 1, device)
    trip = 2 * expert_exchange(rows, 2 * hidden, shape.topk, spread, device, rank.work.imbalance)
    forward = Seconds(matmuls[0], 0.0, elementwise(moved, device) + device.mixture_overhead, experts=trip)
    backward = Seconds(matmuls[1], 0.0, elementwise(2 * moved, device) + 2 * device.mixture_overhead, experts=trip)
    return forward, backward


def _tensor(hidden: int, rank: Rank) -> float:
    """Sequence-parallel rows are gathered before, and sums scattered after, each half of a layer."""
    among = group(rank.tp, 1, rank.device)
    size = 2 * rank.tokens * hidden
    return all_gather(size, among, rank.device) + reduce_scatter(size, among, rank.device)


def _context(shape: AttentionShape, rank: Rank) -> float:
    """Keys and values of the other ranks' tokens come round once."""
    if rank.cp == 1:
        return 0.0
    among = group(rank.cp, rank.tp, rank.device)
    width = max(1.0, shape.kv_heads / rank.tp) * (shape.key_size + shape.value_size)
    return all_gather(2 * rank.tokens * width * rank.cp, among, rank.device)
