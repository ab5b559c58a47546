"""Decoding with attention and experts on the same devices: what disaggregation has to beat.

`plan_tensor_parallel`: devices that share every matrix, in as few pipeline stages as the model needs, further devices
being replicas (MegaScale-Infer's baselines). `plan_colocated`: wide expert parallelism with data parallel attention on
all devices, with or without two micro-batches that hide each other's messages (as DeepSeek serves).
"""

from __future__ import annotations

from moesaic.plan.disaggregation.decode_parts import (
    ACTIVATION,
    DecodePlan,
    Decoding,
    attention_bytes,
    attention_seconds,
    exchange_seconds,
    expert_bytes,
    expert_seconds,
    head_seconds,
    room,
)
from moesaic.plan.hardware import Cluster
from moesaic.plan.shape import ModelShape


def plan_colocated(model: ModelShape, cluster: Cluster, asked: Decoding, overlap: bool = False) -> DecodePlan | None:
    """Expert parallelism over the whole cluster, attention data parallel on every device; the best that meets `tpot`.
    `overlap`: two micro-batches, one computing while the other's tokens travel."""
    asked.check(cluster.count)
    free = room(cluster.device) - attention_bytes(model, asked.dtype) - expert_bytes(model, asked.dtype, cluster.count)
    if free <= 0:
        return None
    most = asked.sequences(model, free) * cluster.count
    least = (2 if overlap else 1) * cluster.count
    return asked.best(
        _colocated(model, cluster, asked, size, overlap) for size in asked.sizes(most) if least <= size <= most
    )


def _colocated(model: ModelShape, cluster: Cluster, asked: Decoding, batch: int, overlap: bool) -> DecodePlan:
    context, dtype, count = asked.context, asked.dtype, 2 if overlap else 1
    tokens, device = batch / count, cluster.device
    total = busy_a = busy_e = 0.0
    worst = (0.0, 0.0, 0.0)
    for layer, layers in model.kinds().items():
        a = attention_seconds(layer.attention, model.hidden, tokens / cluster.count, context, device, dtype)
        e = expert_seconds(layer.ffn, model.hidden, tokens, cluster.count, device, dtype)
        c = 0.0
        if cluster.count > 1:
            c = exchange_seconds(layer.ffn, model.hidden, tokens, cluster)
        # Both directions of both micro-batches leave through the same port.
        total += layers * (max(2 * (a + e), a + e + 2 * c, 4 * c) if overlap else a + e + 2 * c)
        busy_a += layers * count * a
        busy_e += layers * count * e
        worst = max(worst, (a, e, c), key=sum)
    head = head_seconds(model, batch / cluster.count, device)
    step = total + head
    a, e, c = worst
    bound = "messages" if 2 * c > (a + e if overlap else max(a, e)) else "attention" if a > e else "experts"
    kind = "expert parallel, overlapped" if overlap else "expert parallel"
    return DecodePlan(
        kind, cluster.count, 0, count, batch, a, e, c, step, (busy_a + busy_e + head) / step, 0.0, cluster.price, bound
    )


def plan_tensor_parallel(model: ModelShape, cluster: Cluster, asked: Decoding) -> DecodePlan | None:
    """The best of 1, 2, 4, ... devices of a domain that share every matrix; the rest are replicas."""
    asked.check(cluster.count)
    found: list[DecodePlan] = []
    for tp in (1, 2, 4, 8, 16):
        for stages in (1, 2, 4, 8, 16):
            if tp > cluster.device.domain or cluster.count % (tp * stages) or stages > len(model.layers):
                continue
            fewer_do = stages > 1 and _sequences(model, cluster, asked, tp, stages // 2)
            if fewer_do or (stages > 1 and tp < min(8, cluster.device.domain)):
                continue
            replicas = cluster.count // (tp * stages)
            most = _sequences(model, cluster, asked, tp, stages)
            for size in asked.sizes(most, replicas):
                if stages <= size <= most:
                    found.append(_tensor_parallel(model, cluster, asked, size, tp, stages))
    return asked.best(found)


def _sequences(model: ModelShape, cluster: Cluster, asked: Decoding, tp: int, stages: int) -> int:
    """That have room in one replica."""
    held = (attention_bytes(model, asked.dtype) + expert_bytes(model, asked.dtype, 1)) / (tp * stages)
    shares = 1 if any(layer.attention.latent for layer in model.layers) else tp  # a latent is not divided
    free = room(cluster.device) - held
    return asked.sequences(model, free * shares * stages) if free > 0 else 0


def _tensor_parallel(
    model: ModelShape, cluster: Cluster, asked: Decoding, size: int, tp: int, stages: int
) -> DecodePlan:
    """`size` sequences in a replica: every stage works on its own share of them, one after another."""
    device, tokens, context, dtype = cluster.device, size / stages, asked.context, asked.dtype
    message = 0.0
    if tp > 1:
        moved = 2 * tokens * model.hidden * ACTIVATION * (tp - 1) / tp
        message = moved / (device.link * device.link_share) + device.link_latency
    total = busy = 0.0
    worst = (0.0, 0.0)
    for layer, layers in model.kinds().items():
        a = attention_seconds(layer.attention, model.hidden, tokens, context, device, dtype, tp)
        e = expert_seconds(layer.ffn, model.hidden, tokens, tp, device, dtype, tp)
        total += layers * (a + e + 2 * message)
        busy += layers * (a + e)
        worst = max(worst, (a, e), key=sum)
    head = head_seconds(model, tokens, device, tp)
    passing = tokens * model.hidden * ACTIVATION / tp / (device.network * device.network_share)
    step = total + head + (stages > 1) * stages * (passing + device.network_latency)
    a, e = worst
    bound = "messages" if 2 * message > max(a, e) else "attention" if a > e else "experts"
    return DecodePlan(
        f"tensor parallel {tp}" + (f" x {stages} stages" if stages > 1 else ""), cluster.count, 0, stages,
        size * (cluster.count // (tp * stages)), a, e, message, step, (busy + head) / step, 0.0, cluster.price, bound,
    )  # fmt: skip
