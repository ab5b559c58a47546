"""DisagMoE (arXiv 2605.11005): train with attention and experts on disjoint groups of devices (AF-Pipe).

    plans = compare(load_model("qwen3-235b-a22b"), load_cluster("128xH800"), sequence=4096, sequences=4)

Both groups always have forward and backward work of some micro-batch, and tokens travel one way at a time between them,
many to many, so that messages hide behind everything. A roofline divides the devices: the step is as long as the
slowest of attention's compute, the experts' compute, and either group's network ports. Compared with expert parallelism
on all devices, its dispatch and combine exposed (Megatron-LM's 1F1B), hidden behind the experts (Tutel, Comet), or
hidden behind another micro-batch while some cores move data (DualPipe). `af_pipe` plays the pipeline event by event.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

from moesaic.errors import UserError
from moesaic.plan import cost
from moesaic.plan.collectives import expert_exchange, group
from moesaic.plan.hardware import Cluster, Device
from moesaic.plan.shape import FfnShape, LayerShape, ModelShape
from moesaic.plan.training.layer_cost import Rank, layer_passes
from moesaic.plan.training.workload import TrainingWork

ROW_BYTES = 2.0
CHUNKS = 4  # that dispatch, experts and combine are cut into to overlap (Tutel, Comet)
SENDING_CORES = 20 / 132  # share of an H800's cores that DualPipe gives to communication (DeepSeek-V3, section 3.2.2)


@dataclass(frozen=True)
class TrainingSplit:
    """Seconds of one layer, forward and backward, for the same tokens over the same devices."""

    kind: str
    attention: int  # devices; all of them where they are not divided
    experts: int
    attention_seconds: float
    expert_seconds: float
    message_seconds: float  # the busiest port, all four messages
    seconds: float
    bound: str

    @property
    def exposed(self) -> float:
        """Share of the time in which a device's compute waits."""
        busy = (self.attention_seconds * self.attention + self.expert_seconds * self.experts) / self.devices
        if not self.experts:
            busy = self.attention_seconds + self.expert_seconds
        return 1 - busy / self.seconds

    @property
    def devices(self) -> int:
        return self.attention + self.experts


@dataclass(frozen=True)
class Layer:
    """One layer under one amount of work: what everything here is priced from."""

    model: ModelShape
    layer: LayerShape
    device: Device
    sequence: int
    dtype: str

    def attention_seconds(self, tokens: float) -> float:
        """Forward and backward of one device's `tokens`, the norms of both halves with it."""
        alone = LayerShape(self.layer.attention, FfnShape(0))
        work = TrainingWork(batch=1, sequence=self.sequence, dtype=self.dtype, fused_attention=True)
        forward, backward = layer_passes(alone, self.model.hidden, Rank(self.device, work, 1, 1, 1, 1))
        return (forward.compute + backward.compute) * tokens / self.sequence

    def expert_seconds(self, tokens: float, devices: int) -> float:
        """Forward and backward of one of `devices` that divide the experts and `tokens` between them."""
        ffn, hidden, device = self.layer.ffn, self.model.hidden, self.device
        held = max(1.0, ffn.experts / devices)
        rows = tokens * ffn.topk / devices / held
        seconds = self._three(rows, ffn.hidden, held)
        if ffn.shared_hidden:
            seconds += self._three(tokens / devices, ffn.shared_hidden, 1)
        moved = tokens * ffn.topk / devices * ROW_BYTES * (4 * hidden + 3 * ffn.hidden)
        return seconds + 3 * cost.elementwise(moved, device)  # permuted in and out, and the activation between

    def _three(self, rows: float, width: float, count: float) -> float:
        """The matmuls of a gated feed-forward, forward and for both gradients."""
        hidden, up = self.model.hidden, (self.layer.ffn.matrices - 1) * width
        sizes = [(rows, up, hidden), (rows, hidden, up), (hidden, up, rows)]
        sizes += [(rows, hidden, width), (rows, width, hidden), (width, hidden, rows)]
        return sum(cost.matmul(m, n, k, self.device, self.dtype, count) for m, n, k in sizes)

    def exchange_seconds(self, tokens: float, devices: int) -> float:
        """One dispatch or combine of expert parallelism among `devices`, each with its `tokens`."""
        among = group(devices, 1, self.device)
        return expert_exchange(tokens, self.model.hidden * ROW_BYTES, self.layer.ffn.topk, among, self.device)

    def message_seconds(self, tokens: float, attention: int, experts: int) -> float:
        """The busiest port's four messages of `tokens` in all: two leave it and two reach it, both at once. A node of
        experts gets a token once and passes it on inside."""
        device, ffn = self.device, self.layer.ffn
        nodes = max(1, math.ceil(experts / device.domain))
        reached = nodes * (1 - (1 - 1 / nodes) ** ffn.topk)
        volume = tokens * reached * self.model.hidden * ROW_BYTES
        port = 2 * volume / min(attention, experts) / (device.network * device.network_share)
        inside = 2 * tokens * ffn.topk * self.model.hidden * ROW_BYTES / experts / (device.link * device.link_share)
        return max(port, inside) + 4 * device.network_latency


def compare(
    model: ModelShape, cluster: Cluster, *, sequence: int, sequences: int = 1, ep: int = 64, dtype: str = "bf16"
) -> dict[str, TrainingSplit]:
    """Every way to run one layer of experts on the same tokens: `sequences` of length `sequence` per device and
    micro-batch. `ep`: devices that share a set of experts."""
    layer = next((one for one in reversed(model.layers) if one.ffn.experts), None)
    if layer is None:
        raise UserError(model.name, "has no experts", "DisagMoE divides attention from experts; take a mixture.")
    ep = min(ep, cluster.count, layer.ffn.experts)
    if cluster.count < 2 or cluster.count % ep:
        raise UserError(f"--cluster {cluster.name}", f"is not a multiple of ep = {ep} devices, two at least")
    priced = Layer(model, layer, cluster.device, sequence, dtype)
    tokens = float(sequence * sequences)
    attention, experts = priced.attention_seconds(tokens), priced.expert_seconds(tokens * ep, ep)
    messages = 4 * priced.exchange_seconds(tokens, ep)
    overlapped = max(experts, messages) + min(experts, messages) / CHUNKS
    busy = (attention + experts) / (1 - SENDING_CORES)
    times = {
        "exposed": attention + experts + messages,
        "overlapped with experts": attention + overlapped,
        "overlapped with all": max(busy, messages),
    }
    plans = {
        kind: TrainingSplit(
            kind, ep, 0, attention, experts, messages, seconds, "messages" if messages > experts else "compute"
        )
        for kind, seconds in times.items()
    }
    return plans | {"disaggregated": split(priced, tokens, ep)}


def split(priced: Layer, tokens: float, devices: int) -> TrainingSplit:
    """The best division of `devices`, each of which would have had `tokens`."""
    best: TrainingSplit | None = None
    for attention in range(1, devices):
        experts = devices - attention
        a = priced.attention_seconds(tokens * devices / attention)
        e = priced.expert_seconds(tokens * devices, experts)
        c = priced.message_seconds(tokens * devices, attention, experts)
        seconds = max(a, e, c)
        bound = {a: "attention", e: "experts", c: "messages"}[seconds]
        if best is None or seconds < best.seconds:
            best = TrainingSplit("disaggregated", attention, experts, a, e, c, seconds, bound)
    assert best is not None
    return best


def roofline_share(plan: TrainingSplit) -> float:
    """Share of the devices that attention should have for equal compute times, whatever the network does."""
    attention = plan.attention_seconds * plan.attention
    experts = plan.expert_seconds * (plan.experts or plan.attention)
    return attention / (attention + experts)


def af_pipe(plan: TrainingSplit, layers: int, micro_batches: int) -> float:
    """Seconds of `micro_batches` through `layers`, forward and backward, event by event: each group takes whatever is
    ready, backward first; ports work beside it, one direction for each group. A third of the work is forward."""
    steps = 2 * layers  # attention, experts, attention, ... and the same way back
    compute = {0: plan.attention_seconds, 1: plan.expert_seconds}
    # Two messages leave a group per layer, one forward and one backward: each half of what its port is busy.
    message = plan.message_seconds / 2
    free = {("compute", 0): 0.0, ("compute", 1): 0.0, ("port", 0): 0.0, ("port", 1): 0.0}
    waiting: dict[tuple[str, int], list[tuple[int, int, float]]] = {place: [] for place in free}
    events: list[tuple[float, int, int]] = [(0.0, micro, 0) for micro in range(micro_batches)]
    heapq.heapify(events)  # when a micro-batch's next operation is ready; operations alternate compute and message
    end = 0.0

    def operation(number: int) -> tuple[tuple[str, int], float, bool]:
        stage, sending = divmod(number, 2)
        backward = stage >= steps
        side = (stage if not backward else 2 * steps - 1 - stage) % 2
        if sending:
            turning = stage == steps - 1  # the last experts' backward follows their forward where they are
            return ("port", side), 0.0 if turning else message, backward
        return ("compute", side), compute[side] * (2 / 3 if backward else 1 / 3), backward

    total = 2 * 2 * steps - 1
    while events:
        now, micro, number = heapq.heappop(events)
        if micro >= 0:
            place, _, backward = operation(number)
            heapq.heappush(waiting[place], (0 if backward else 1, number, float(micro)))
        for place, queue in waiting.items():
            if queue and free[place] <= now:
                _, chosen, which = heapq.heappop(queue)
                seconds = operation(chosen)[1]
                free[place] = now + seconds
                end = max(end, free[place])
                if chosen + 1 < total:
                    heapq.heappush(events, (free[place], int(which), chosen + 1))
                heapq.heappush(events, (free[place], -1, 0))  # look again when it is free
    return end
