"""One micro-batch in one layer of decoding, part by part: attention, experts, messages; and what a device has room for.

Shared by the layouts that are compared: attention and experts apart (megascale_infer.py) or together (colocated.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from moesaic.errors import UserError
from moesaic.plan import cost
from moesaic.plan.hardware import FORMAT_BYTES, Cluster, Device
from moesaic.plan.shape import AttentionShape, FfnShape, ModelShape

RESERVED = 0.1  # of a device's memory: activations, buffers, the runtime
ACTIVATION = 2.0  # bytes per number on the wire and in activations
SIZES = 32  # batches tried
KERNELS = 6  # of attention beside its matmuls: norms, rotary embedding, cache writes


@dataclass(frozen=True)
class DecodePlan:
    """One way to decode. Seconds are per layer and micro-batch; utilisation: share of time a compute stream is busy."""

    kind: str  # disaggregated, tensor parallel, expert parallel, expert parallel overlapped
    attention: int  # devices
    experts: int
    micro_batches: int
    batch: int  # sequences under way, in all
    attention_seconds: float
    expert_seconds: float
    message_seconds: float
    tpot: float
    attention_utilisation: float
    expert_utilisation: float
    dollars_per_hour: float
    bound: str

    @property
    def devices(self) -> int:
        return self.attention + self.experts

    @property
    def tokens_per_second(self) -> float:
        return self.batch / self.tpot

    @property
    def tokens_per_second_per_device(self) -> float:
        return self.tokens_per_second / self.devices

    @property
    def tokens_per_dollar(self) -> float:
        return self.tokens_per_second * 3600 / self.dollars_per_hour if self.dollars_per_hour else math.inf


@dataclass(frozen=True)
class Decoding:
    """What is asked of every layout: tokens of context per sequence, and the seconds per token that must be kept."""

    context: float
    tpot: float
    dtype: str = "bf16"
    batch: int | None = None  # sequences under way; else the layout takes as many as it does best with

    def check(self, *counts: int) -> None:
        if self.context <= 0 or self.tpot <= 0 or min(counts) < 1:
            raise UserError("disaggregation", "context, tpot and the numbers of devices must be above zero")

    def sequences(self, model: ModelShape, free: float) -> int:
        """That have room for their caches in `free` bytes."""
        return int(free / (model.cache_width() * ACTIVATION * self.context))

    def sizes(self, most: int, replicas: int = 1) -> list[int]:
        """Batches to try in each of the replicas, `most` having room."""
        if self.batch:
            return [self.batch // replicas]
        return [round(most * share / SIZES) for share in range(1, SIZES + 1)]

    def best(self, plans: Iterable[DecodePlan]) -> DecodePlan | None:
        kept = (plan for plan in plans if plan.tpot <= self.tpot)
        return max(kept, key=lambda plan: plan.tokens_per_second, default=None)


@lru_cache(maxsize=100_000)
def attention_seconds(
    shape: AttentionShape, hidden: int, sequences: float, context: float, device: Device, dtype: str, tp: int = 1
) -> float:
    """Decode: projections of `sequences` tokens, and their caches read. `tp` devices share the heads."""
    heads = shape.heads / tp
    if shape.latent is None:
        kv = max(1.0, shape.kv_heads / tp)
        width = heads * shape.key_size + kv * (shape.key_size + shape.value_size)
        seconds = cost.matmul(sequences, width, hidden, device, dtype)
        cache, scores = kv * (shape.key_size + shape.value_size), shape.key_size + shape.value_size
    else:
        low = shape.latent
        first = (low.q_rank or 0) + low.kv_rank + low.rope
        seconds = cost.matmul(sequences, first, hidden, device, dtype)
        seconds += cost.matmul(sequences, heads * shape.key_size, low.q_rank or hidden, device, dtype)
        folded = heads * (shape.key_size - low.rope + shape.value_size)
        seconds += cost.matmul(sequences, folded, low.kv_rank, device, dtype)
        cache, scores = low.kv_rank + low.rope, 2 * low.kv_rank + low.rope
    keys = min(context, shape.window or context, shape.topk or context)
    flops = 2 * sequences * heads * scores * keys
    seconds += cost.attention(flops, sequences * keys * cache * ACTIVATION, device)
    seconds += cost.matmul(sequences, hidden, heads * shape.value_size, device, dtype)
    return seconds + KERNELS * device.launch + 4 * cost.elementwise(sequences * hidden * ACTIVATION, device)


def expert_split(ffn: FfnShape, devices: int) -> int:
    """Devices that share one expert's matrices, where there are more devices than experts."""
    return next(split for split in range(1, devices + 1) if not devices % split and devices // split <= ffn.experts)


@lru_cache(maxsize=100_000)
def expert_seconds(
    ffn: FfnShape, hidden: int, tokens: float, devices: int, device: Device, dtype: str, split: int | None = None
) -> float:
    """`tokens` in all, over `devices` that divide the experts; the device that holds most of them counts."""
    if not ffn.experts:
        return _ffn(tokens, ffn.hidden / devices, hidden, ffn.matrices, device, dtype, 1)
    split = split or expert_split(ffn, devices)
    held = math.ceil(ffn.experts * split / devices)
    touched = held * (1 - (1 - ffn.topk / ffn.experts) ** tokens)
    rows = tokens * ffn.topk / ffn.experts * held / max(touched, 1e-9)
    seconds = _ffn(rows, ffn.hidden / split, hidden, ffn.matrices, device, dtype, touched)
    if ffn.shared_hidden:  # a copy on each device, for the tokens that the others do not take
        seconds += _ffn(tokens * split / devices, ffn.shared_hidden / split, hidden, ffn.matrices, device, dtype, 1)
    return seconds


def _ffn(rows: float, width: float, hidden: int, matrices: int, device: Device, dtype: str, count: float) -> float:
    up = cost.matmul(rows, (matrices - 1) * width, hidden, device, dtype, count)
    return up + cost.matmul(rows, hidden, width, device, dtype, count)


def message_seconds(ffn: FfnShape, hidden: int, tokens: float, attention: Cluster, experts: Cluster) -> float:
    """One way, many to many: a token goes once to each group of devices that holds one of its experts."""
    volume = tokens * distinct(ffn, experts.count) * hidden * ACTIVATION
    one, other = attention.device, experts.device
    if one == other and attention.count + experts.count <= one.domain:  # all of them in one domain
        return volume / min(attention.count, experts.count) / (one.link * one.link_share) + one.link_latency
    sending = volume / attention.count / (one.network * one.network_share)
    receiving = volume / experts.count / (other.network * other.network_share)
    return max(sending, receiving) + max(one.network_latency, other.network_latency)


def distinct(ffn: FfnShape, devices: int) -> float:
    """Devices, or groups that share an expert, that a token goes to on average, its experts chosen at random."""
    if not ffn.experts:
        return 1.0
    groups = devices // expert_split(ffn, devices)
    return groups * (1 - (1 - 1 / groups) ** ffn.topk)


def exchange_seconds(ffn: FfnShape, hidden: int, tokens: float, cluster: Cluster) -> float:
    """All-to-all of expert parallelism, one way: what stays in the domain goes over the link, the rest over the
    network, both at once."""
    device = cluster.device
    volume = tokens / cluster.count * distinct(ffn, cluster.count) * hidden * ACTIVATION
    inside = min(cluster.count, device.domain)
    local = volume * (inside - 1) / cluster.count / (device.link * device.link_share)
    wide = volume * (cluster.count - inside) / cluster.count / (device.network * device.network_share)
    latency = device.network_latency if cluster.count > device.domain else device.link_latency
    return max(local, wide) + latency


def head_seconds(model: ModelShape, sequences: float, device: Device, tp: int = 1) -> float:
    return cost.matmul(sequences, model.vocab / tp, model.hidden, device, "bf16")


def room(device: Device) -> float:
    return device.memory_bytes * (1 - RESERVED)


def attention_bytes(model: ModelShape, dtype: str) -> float:
    """Attention, embedding and output matrix: what an attention device holds."""
    inside = sum(count * layer.attention.parameters(model.hidden) for layer, count in model.kinds().items())
    tables = model.embedding_parameters * (1 if model.tied else 2)
    return inside * FORMAT_BYTES[dtype] + tables * ACTIVATION


def expert_bytes(model: ModelShape, dtype: str, devices: int) -> float:
    """Of one of the `devices` that divide the experts; shared experts and the router are on each."""
    total = 0.0
    for layer, count in model.kinds().items():
        routed = layer.ffn.expert_parameters(model.hidden)
        if routed:
            share = math.ceil(layer.ffn.experts * expert_split(layer.ffn, devices) / devices) / layer.ffn.experts
            share /= expert_split(layer.ffn, devices)
            total += count * (routed * share + layer.ffn.other_parameters(model.hidden))
        else:
            total += count * layer.ffn.other_parameters(model.hidden) / devices
    return total * FORMAT_BYTES[dtype]
