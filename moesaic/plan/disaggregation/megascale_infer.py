"""MegaScale-Infer (arXiv 2504.02263): attention and experts on separate devices, micro-batches ping-pong between them.

    plan = plan_disaggregated(model, Cluster(h20, 16), Cluster(l40s, 16), Decoding(context=2000, tpot=0.1))

While the experts work on one micro-batch the attention devices work on another. With attention time T_a, expert time
T_e, T_f the longer one, and T_c one way on the wire (shorter than T_f), m micro-batches keep both busy if
m T_f >= 2 (T_f + T_c); then a layer costs m T_f, else what one micro-batch needs for its round trip. All attention
devices feed the same experts, so their batches add up there. `colocated.py` has what this is compared with. Decode
only; the devices of each are alike; experts are chosen evenly. `ping_pong` replays the pipeline event by event.
"""

from __future__ import annotations

import math

from moesaic.plan.disaggregation.colocated import plan_colocated, plan_tensor_parallel
from moesaic.plan.disaggregation.decode_parts import (
    DecodePlan,
    Decoding,
    attention_bytes,
    attention_seconds,
    expert_bytes,
    expert_seconds,
    head_seconds,
    message_seconds,
    room,
)
from moesaic.plan.hardware import Cluster, Device
from moesaic.plan.shape import ModelShape
from moesaic.plan.timeline.events import Operation, Timeline, simulate

MOST_MICRO_BATCHES = 6


def micro_batches_needed(busy: float, message: float) -> int:
    """Fewest micro-batches that hide the messages, `busy` being the longer of attention and experts."""
    return math.ceil(2 * (1 + message / busy) - 1e-9) if busy > 0 else 1


def layer_seconds(attention: float, experts: float, message: float, micro_batches: int) -> float:
    """Of all micro-batches through one layer, in the steady state."""
    return max(micro_batches * max(attention, experts, message), attention + experts + 2 * message)


def plan_disaggregated(
    model: ModelShape, attention: Cluster, experts: Cluster, asked: Decoding, micro_batches: int | None = None
) -> DecodePlan | None:
    """The best that these two clusters do, every device used; None where it does not fit or misses `tpot`.

    The roofline's answer: the largest batch that fits and meets `tpot` (or the one asked for), in as many micro-batches
    as hide the messages; one more or less is tried too.
    """
    asked.check(attention.count, experts.count)
    free = room(attention.device) - attention_bytes(model, asked.dtype)
    weights = expert_bytes(model, asked.dtype, experts.count)
    if free <= 0 or weights > room(experts.device):
        return None
    most = asked.sequences(model, free) * attention.count
    found: list[DecodePlan] = []
    for count in [micro_batches] if micro_batches else range(1, MOST_MICRO_BATCHES + 1):
        for size in asked.sizes(most):
            if count * attention.count <= size <= most:
                found.append(_disaggregated(model, attention, experts, asked, size, count))
    return asked.best(found)


def _disaggregated(
    model: ModelShape, attention: Cluster, experts: Cluster, asked: Decoding, batch: int, count: int
) -> DecodePlan:
    tokens = batch / count
    total = busy_a = busy_e = 0.0
    worst = (0.0, 0.0, 0.0)
    for layer, layers in model.kinds().items():
        own = tokens / attention.count
        a = attention_seconds(layer.attention, model.hidden, own, asked.context, attention.device, asked.dtype)
        e = expert_seconds(layer.ffn, model.hidden, tokens, experts.count, experts.device, asked.dtype)
        c = message_seconds(layer.ffn, model.hidden, tokens, attention, experts)
        total += layers * layer_seconds(a, e, c, count)
        busy_a += layers * count * a
        busy_e += layers * count * e
        worst = max(worst, (a, e, c), key=sum)
    a, e, c = worst
    head = head_seconds(model, batch / attention.count, attention.device)
    step = total + head
    bound = "messages" if layer_seconds(a, e, c, count) > count * max(a, e) else "attention" if a > e else "experts"
    return DecodePlan(
        "disaggregated", attention.count, experts.count, count, batch, a, e, c, step, (busy_a + head) / step,
        busy_e / step, attention.price + experts.price, bound,
    )  # fmt: skip


def search_split(
    model: ModelShape, attention: Device, experts: Device, devices: int, asked: Decoding, per_dollar: bool = False
) -> DecodePlan | None:
    """How many of `devices` hold attention and how many experts: the most tokens per second, or per dollar."""
    plans = []
    for count in range(1, devices) if devices <= 16 else range(2, devices, 2):
        clusters = Cluster(attention, count), Cluster(experts, devices - count)
        if plan := plan_disaggregated(model, *clusters, asked):
            plans.append(plan)
    value = (lambda plan: plan.tokens_per_dollar) if per_dollar else (lambda plan: plan.tokens_per_second)
    return max(plans, key=value, default=None)


def compare_decoding(model: ModelShape, cluster: Cluster, asked: Decoding) -> dict[str, DecodePlan | None]:
    """The same devices in every layout, each at its best under `tpot`; None where a layout does not fit or is too
    slow."""
    return {
        "tensor parallel": plan_tensor_parallel(model, cluster, asked),
        "expert parallel": plan_colocated(model, cluster, asked),
        "overlapped": plan_colocated(model, cluster, asked, overlap=True),
        "disaggregated": search_split(model, cluster.device, cluster.device, cluster.count, asked),
    }


def ping_pong(plan: DecodePlan, layers: int, steps: int = 1) -> Timeline:
    """The pipeline event by event: one rank of attention, one of experts, and the wire's two directions between."""
    operations: list[Operation] = []
    last: list[int | None] = [None] * plan.micro_batches
    for step in range(steps):
        for layer in range(layers):
            for micro in range(plan.micro_batches):
                after = last[micro]
                for name, rank, stream, seconds in (
                    ("attention", 0, "compute", plan.attention_seconds),
                    ("dispatch", 0, "send", plan.message_seconds),
                    ("experts", 1, "compute", plan.expert_seconds),
                    ("combine", 1, "send", plan.message_seconds),
                ):
                    waits = () if after is None else (after,)
                    operations.append(Operation(name, name, rank, stream, seconds, waits, micro, layer, step=step))
                    after = len(operations) - 1
                last[micro] = after
    return simulate(operations)
