"""Seconds of one step of a serving engine: some sequences decode a token, some prompt tokens are prefilled.

Every rank of a replica does the same work, so one rank is priced: matmuls by the roofline of their weights' bytes and
their flops, attention by the cache it reads, experts by how many of them are touched, messages by size and latency, and
a launch per kernel. What a device reaches of its peaks is in `hardware.yaml` (serve_*).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from moesaic.parallel.layout import ParallelLayout
from moesaic.plan.collectives import Group, group
from moesaic.plan.hardware import FORMAT_BYTES, Device
from moesaic.plan.serving.engines import Engine
from moesaic.plan.serving.measured_tables import ExpertLayer, MeasuredTables
from moesaic.plan.shape import AttentionShape, FfnShape, ModelShape

# Kernels per layer, in the forms engines fuse them to.
KERNELS = {"attention": 7.0, "latent": 8.1, "dense": 3.0, "experts": 7.5}
IMBALANCE = 1.6  # load of the busiest rank of experts over the mean
VARIETY = 0.84  # tokens choose experts less independently than at random: so many tokens' worth of choices per token
PADDING = 32  # rows that an expert's matmul computes at most beside those it has
NARROW = 0.88  # narrower formats speed up experts' matmuls by this power of what they do for the device's peak
WIDENED = 0.73  # share of the bandwidth at which experts' weights are read that must be widened first
PASSES = 4  # times that the rows of experts' inputs and outputs are moved: permuted, quantised, scaled, added up
BF16 = 2.0


@dataclass(frozen=True)
class Batch:
    """What one step computes in one replica of the attention."""

    sequences: float = 0.0  # that decode one token each
    context: float = 0.0  # tokens in the cache of each, on average
    prompt_tokens: float = 0.0  # prefilled in this step
    prompt_context: float = 0.0  # keys a prompt token attends to, on average

    @property
    def tokens(self) -> float:
        return self.sequences + self.prompt_tokens


@dataclass
class StepTime:
    """Seconds by what bounds them."""

    parts: dict[str, float] = field(
        default_factory=lambda: {"bandwidth": 0.0, "compute": 0.0, "communication": 0.0, "launch": 0.0}
    )

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def bound(self) -> str:
        return max(self.parts, key=lambda name: self.parts[name])

    def add(self, part: str, seconds: float) -> None:
        self.parts[part] += seconds

    def scale(self, factor: float) -> None:
        self.parts = {part: seconds * factor for part, seconds in self.parts.items()}


@dataclass(frozen=True)
class Serving:
    """One way to serve a model: what stays the same from step to step."""

    model: ModelShape
    device: Device
    layout: ParallelLayout
    engine: Engine
    dtype: str
    cache_dtype: str
    tables: MeasuredTables | None = None  # measured times of expert layers, in place of their roofline

    @property
    def dense_dtype(self) -> str:
        """Four-bit checkpoints of mixtures keep attention and what every token passes in more bits: in bf16 where
        only weights are quantised (int4), else partly in fp8 or fp4, for which fp8 stands here."""
        if not self.model.experts or FORMAT_BYTES[self.dtype] >= 1:
            return self.dtype
        return "bf16" if self.dtype == "int4" or not self.computes(self.dtype) else "fp8"

    def rate(self, dtype: str) -> float:
        """Flops per second of matmuls. Without units for a format of few bits weights are widened to bf16."""
        return self.device.peak(dtype if self.computes(dtype) else "bf16") * self.device.serve_compute

    def computes(self, dtype: str) -> bool:
        """Whether the device has units for a format, or widens it to one it has."""
        return dtype in self.device.flops or FORMAT_BYTES[dtype] >= 1

    def step(self, batch: Batch) -> StepTime:
        time = StepTime()
        stages, contexts = self.layout.pp, self.layout.cp
        if contexts > 1:  # each rank has its part of a prompt, and of the cache that decoding reads
            batch = replace(batch, prompt_tokens=batch.prompt_tokens / contexts, context=batch.context / contexts)
        for layer, count in self.model.kinds().items():
            one = StepTime()
            self._attention(layer.attention, batch, one)
            self._ffn(layer.ffn, batch, one)
            for part, seconds in one.parts.items():
                time.add(part, seconds * count)  # the stages of a pipeline work one after another on one token
        self._matmul(batch.sequences + 1, self.model.vocab / self.layout.tp, self.model.hidden, "bf16", time)
        if stages > 1:
            message = batch.tokens * self.model.hidden * BF16 / self.layout.tp
            time.add("communication", (stages - 1) * (message / self.device.link + self.device.serve_reduce))
        time.add("launch", self.engine.step + self.engine.sequence * batch.sequences)
        return time

    def _matmul(self, m: float, n: float, k: float, dtype: str, time: StepTime) -> None:
        self._roofline(2 * m * n * k, n * k * FORMAT_BYTES[dtype] + m * (n + k) * BF16, self.rate(dtype), time)

    def _roofline(self, flops: float, bytes_: float, rate: float, time: StepTime, share: float = 1.0) -> None:
        computing = flops / rate
        moving = bytes_ / (self.device.bandwidth * self.device.serve_memory * share)
        total: float = (computing**2 + moving**2) ** 0.5
        time.add("compute" if computing > moving else "bandwidth", total)

    def _launch(self, kernels: float, batch: Batch, time: StepTime) -> None:
        """Steps that only decode replay a CUDA graph; others are launched kernel by kernel."""
        graph = self.device.serve_kernel
        each = max(graph, self.engine.eager) if batch.prompt_tokens else graph
        time.add("launch", kernels * self.engine.kernels * each)

    def _attention(self, shape: AttentionShape, batch: Batch, time: StepTime) -> None:
        hidden, tp, tokens, dtype = self.model.hidden, self.layout.tp, batch.tokens, self.dense_dtype
        heads = shape.heads / tp
        kernels = KERNELS["attention"]
        if shape.latent is None:
            kv = max(1.0, shape.kv_heads / tp)
            width = heads * shape.key_size + kv * (shape.key_size + shape.value_size)
            self._matmul(tokens, width, hidden, dtype, time)
            cache_width = kv * (shape.key_size + shape.value_size)
            score_width = shape.key_size + shape.value_size
        else:
            low, kernels = shape.latent, KERNELS["latent"]
            plain = shape.key_size - low.rope
            self._matmul(tokens, (low.q_rank or 0) + low.kv_rank + low.rope, hidden, dtype, time)
            self._matmul(tokens, heads * shape.key_size, low.q_rank or hidden, dtype, time)
            # Absorbed into queries and outputs when decoding, unfolded when prefilling: the same matrix either way.
            self._matmul(tokens, heads * (plain + shape.value_size), low.kv_rank, dtype, time)
            cache_width = low.kv_rank + low.rope
            score_width = 2 * low.kv_rank + low.rope
        if shape.topk:
            self._indexer(shape, batch, time)
            kernels += 6
        seen = min(batch.context, shape.window or batch.context, shape.topk or batch.context)
        if batch.sequences:
            flops = 2 * batch.sequences * heads * score_width * seen
            bytes_ = batch.sequences * seen * cache_width * FORMAT_BYTES[self.cache_dtype]
            if shape.state:  # read and written in float32
                bytes_ = batch.sequences * shape.state / tp * 8
            self._roofline(flops, bytes_, self.rate("bf16"), time, self.device.serve_attention)
        if batch.prompt_tokens:
            keys = min(batch.prompt_context, shape.window or math.inf, shape.topk or math.inf)
            flops = 2 * batch.prompt_tokens * heads * (shape.key_size + shape.value_size) * keys
            bytes_ = batch.prompt_tokens * cache_width * BF16
            self._roofline(flops, bytes_, self.rate("bf16"), time, self.device.serve_attention)
        self._matmul(tokens, hidden, heads * shape.value_size, dtype, time)
        self._launch(kernels, batch, time)
        self._reduce(tokens, time)
        if self.layout.cp > 1:  # keys and values of the others' parts, and partial results of decoding sequences
            among = group(self.layout.cp, tp, self.device)
            bytes_ = (batch.prompt_tokens * cache_width + batch.sequences * heads * score_width) * BF16 * among.size
            self._message(bytes_ * (1 - 1 / among.size), bytes_ * (1 - among.inside / among.size), among, time)

    def _indexer(self, shape: AttentionShape, batch: Batch, time: StepTime) -> None:
        """DSA's indexer is not divided: every rank scores all keys with all of its heads."""
        width = shape.index_heads * shape.index_size
        source = (shape.latent.q_rank if shape.latent else None) or self.model.hidden
        self._matmul(batch.tokens, width, source, self.dense_dtype, time)
        flops = 2 * width * (batch.sequences * batch.context + batch.prompt_tokens * batch.prompt_context)
        bytes_ = batch.sequences * batch.context * shape.index_size
        self._roofline(flops, bytes_, self.rate("fp8"), time, self.device.serve_attention)

    def _ffn(self, shape: FfnShape, batch: Batch, time: StepTime) -> None:
        hidden, tp, tokens = self.model.hidden, self.layout.tp, batch.tokens
        up = shape.matrices - 1
        if not shape.experts:
            self._dense(shape.hidden, up, batch, tp, self.dense_dtype, time)
            self._reduce(tokens, time)
            return
        if shape.shared_hidden:
            self._dense(shape.shared_hidden, up, batch, tp, self.dense_dtype, time)
        self._matmul(tokens, shape.experts, hidden, "bf16", time)
        self._experts(shape, batch, time)
        if self.layout.dp > 1:
            self._exchange(tokens, shape.topk, time)
        else:
            self._reduce(tokens, time)

    def _experts(self, shape: FfnShape, batch: Batch, time: StepTime) -> None:
        hidden, ranks = self.model.hidden, self.layout.tp * self.layout.dp
        ep = min(self.layout.ep, shape.experts)
        tokens = batch.tokens * self.layout.dp
        rows = tokens * shape.topk / ep * (IMBALANCE if ep > 1 else 1)
        # Of this rank's experts, those that at least one token chose.
        touched = shape.experts / ep * (1 - (1 - shape.topk / shape.experts) ** max(1.0, VARIETY * tokens))
        each = rows / touched
        padded = touched * (each + PADDING * each / (each + PADDING))
        parameters = shape.matrices * shape.hidden * ep / ranks * hidden  # of one expert on this rank
        moved = PASSES * rows * (2 * hidden + parameters / hidden) * BF16
        bytes_ = touched * parameters * FORMAT_BYTES[self.dtype] + moved
        wide = self.rate("bf16")
        rate = wide * max(1.0, self.rate(self.dtype) / wide) ** NARROW * self.engine.experts
        own = StepTime()
        self._roofline(2 * padded * parameters, bytes_, rate, own, 1.0 if self.computes(self.dtype) else WIDENED)
        self._launch(KERNELS["experts"], batch, own)
        if self.tables:
            layer = ExpertLayer(hidden, shape.hidden, shape.topk, shape.experts, ranks // ep, ep)
            measured = self.tables.expert_seconds(self.device.name, self.engine.name, self.dtype, layer, tokens)
            # Tables have one kernel alone and one version; the roofline was fitted to whole engines. Halfway between
            # them was closer to measured runs than either.
            own.scale(math.sqrt(measured / own.seconds) if measured else 1.0)
        for part, seconds in own.parts.items():
            time.add(part, seconds)

    def _dense(self, width: int, up: int, batch: Batch, tp: int, dtype: str, time: StepTime) -> None:
        self._matmul(batch.tokens, up * width / tp, self.model.hidden, dtype, time)
        self._matmul(batch.tokens, self.model.hidden, width / tp, dtype, time)
        self._launch(KERNELS["dense"], batch, time)

    def _reduce(self, tokens: float, time: StepTime) -> None:
        among = group(self.layout.tp, 1, self.device)
        bytes_ = 2 * tokens * self.model.hidden * BF16
        # Between domains a device carries its share of what its domain has added up.
        self._message(bytes_ * (1 - 1 / among.size), bytes_ / among.inside, among, time)

    def _exchange(self, tokens: float, topk: int, time: StepTime) -> None:
        """Tokens to the ranks of their experts and back: to each rank once at most, however many experts it holds."""
        ranks = self.layout.tp * self.layout.dp
        among = group(ranks, 1, self.device)
        bytes_ = tokens / self.layout.tp * min(topk, ranks) * self.model.hidden * BF16
        for _ in range(2):
            inside = among.inside / among.size
            self._message(bytes_ * (1 - 1 / among.size), bytes_ * (1 - inside), among, time)

    def _message(self, local: float, wide: float, among: Group, time: StepTime) -> None:
        """`local` bytes over the link of each device; `wide` of them over the network too, if ranks span domains."""
        if among.size == 1:
            return
        device = self.device
        seconds = device.serve_reduce * (1 + math.log2(among.size) / 3) / 2 + local / (device.link * device.serve_link)
        if among.domains > 1:
            seconds += 2 * device.network_latency + wide / (device.network * device.network_share)
        time.add("communication", seconds)
