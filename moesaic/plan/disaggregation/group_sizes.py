"""How many ranks attend and how many hold experts, for `moesaic serve --attention A --experts E` as it works.

    plan = serving_sizes(load_model("glm-4.5-air"), device("h200"), 8, Decoding(context=2048, tpot=0.05))

Differs from MegaScale-Infer's search in what this engine does to keep the bits of one process: attention ranks divide
heads and matrices among them by output rows and gather, dense layers and shared experts stay with them, and an expert
rank returns a row for every assignment, because only the row's owner may add them up. Two micro-batches, always.
"""

from __future__ import annotations

from moesaic.plan import cost
from moesaic.plan.disaggregation.decode_parts import (
    ACTIVATION,
    DecodePlan,
    Decoding,
    attention_bytes,
    attention_seconds,
    distinct,
    expert_seconds,
    head_seconds,
    room,
)
from moesaic.plan.disaggregation.megascale_infer import layer_seconds
from moesaic.plan.hardware import FORMAT_BYTES, Device
from moesaic.plan.shape import FfnShape, LayerShape, ModelShape

MICRO_BATCHES = 2
GATHERS = 2  # of a half layer under tensor parallelism: what the matrix reads, and what it makes


def serving_sizes(model: ModelShape, device: Device, devices: int, asked: Decoding) -> DecodePlan | None:
    """The division of `devices` with the most tokens per second under `tpot`; None where nothing fits."""
    found = (plan for count in range(1, devices) for plan in _plans(model, device, count, devices - count, asked))
    return asked.best(found)


def _plans(model: ModelShape, device: Device, attention: int, experts: int, asked: Decoding) -> list[DecodePlan]:
    mixtures = [layer for layer in model.layers if layer.ffn.experts]
    heads = model.layers[0].attention.heads
    if not mixtures or heads % attention or experts > mixtures[0].ffn.experts:
        return []
    free = room(device) - attention_rank_bytes(model, attention, asked.dtype)
    if free <= 0 or expert_rank_bytes(model, experts, asked.dtype) > room(device):
        return []
    most = asked.sequences(model, free * _cache_shares(model, attention))
    return [
        _plan(model, device, attention, experts, asked, size)
        for size in asked.sizes(most)
        if MICRO_BATCHES <= size <= most
    ]


def attention_rank_bytes(model: ModelShape, ranks: int, dtype: str) -> float:
    """Weights of one of the ranks that attend: a share of everything but the routed experts; routers are whole."""
    inside = 0.0
    for layer, count in model.kinds().items():
        router = layer.ffn.experts * model.hidden
        inside += count * ((layer.ffn.other_parameters(model.hidden) - router) / ranks + router)
    return attention_bytes(model, dtype) / ranks + inside * FORMAT_BYTES[dtype]


def expert_rank_bytes(model: ModelShape, ranks: int, dtype: str, copies: int = 0) -> float:
    """Weights of one of the ranks that hold experts, `copies` of some of each layer's among them."""
    total = 0.0
    for layer, count in model.kinds().items():
        if layer.ffn.experts:
            held = -(-(layer.ffn.experts + copies) // ranks)
            total += count * held * layer.ffn.expert_parameters(model.hidden) / layer.ffn.experts
    return total * FORMAT_BYTES[dtype]


def _cache_shares(model: ModelShape, ranks: int) -> int:
    """Ranks that divide a sequence's cache: none where it is latent, no more than there are heads in it."""
    if any(layer.attention.latent for layer in model.layers):
        return 1
    return min(ranks, min(layer.attention.kv_heads for layer in model.layers))


def _plan(model: ModelShape, device: Device, attention: int, experts: int, asked: Decoding, batch: int) -> DecodePlan:
    tokens = batch / MICRO_BATCHES
    total = busy_a = busy_e = 0.0
    worst = (0.0, 0.0, 0.0)
    for layer, count in model.kinds().items():
        a = _attention_half(layer, model.hidden, tokens, attention, asked, device)
        e = c = 0.0
        if layer.ffn.experts:
            routed = FfnShape(layer.ffn.hidden, layer.ffn.gated, layer.ffn.experts, layer.ffn.topk)
            e = expert_seconds(routed, model.hidden, tokens, experts, device, asked.dtype, 1)
            c = _message_seconds(routed, model.hidden, tokens, attention, experts, device)
        total += count * (layer_seconds(a, e, c, MICRO_BATCHES) if e else MICRO_BATCHES * a)
        busy_a += count * MICRO_BATCHES * a
        busy_e += count * MICRO_BATCHES * e
        worst = max(worst, (a, e, c), key=sum)
    head = head_seconds(model, batch, device, attention)
    step = total + head
    a, e, c = worst
    waits = layer_seconds(a, e, c, MICRO_BATCHES) > MICRO_BATCHES * max(a, e)
    bound = "messages" if waits else "attention" if a > e else "experts"
    return DecodePlan(
        "attention and experts apart", attention, experts, MICRO_BATCHES, batch, a, e, c, step,
        (busy_a + head) / step, busy_e / step, (attention + experts) * device.price, bound,
    )  # fmt: skip


def _attention_half(
    layer: LayerShape, hidden: int, tokens: float, ranks: int, asked: Decoding, device: Device
) -> float:
    """Attention, and the dense network or shared experts of a layer, divided among the ranks that attend."""
    seconds = attention_seconds(layer.attention, hidden, tokens, asked.context, device, asked.dtype, ranks)
    width = layer.ffn.shared_hidden if layer.ffn.experts else layer.ffn.hidden
    halves = 1
    if width:
        halves = 2
        own, up = width / ranks, layer.ffn.matrices - 1
        seconds += cost.matmul(tokens, up * own, hidden, device, asked.dtype)
        seconds += cost.matmul(tokens, hidden, own, device, asked.dtype)
    if ranks > 1:
        moved = tokens * hidden * ACTIVATION * (ranks - 1) / ranks
        rate = device.link * device.link_share if ranks <= device.domain else device.network * device.network_share
        latency = device.link_latency if ranks <= device.domain else device.network_latency
        seconds += halves * GATHERS * (moved / rate + latency)
    return seconds


def _message_seconds(ffn: FfnShape, hidden: int, tokens: float, attention: int, experts: int, device: Device) -> float:
    """The longer of the two ways through the busier ports: a row once to each rank that needs it, a row back for each
    assignment."""
    near = attention + experts <= device.domain
    rate = device.link * device.link_share if near else device.network * device.network_share
    latency = device.link_latency if near else device.network_latency
    rows = tokens * max(distinct(ffn, experts), ffn.topk)
    return rows * hidden * ACTIVATION / min(attention, experts) / rate + latency
