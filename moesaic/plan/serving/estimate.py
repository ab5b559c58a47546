"""What serving a model in one layout will give: latency, throughput, memory, cost, and how wrong that may be.

A number of clients each keep one request under way (as load generators do). A request is prefilled, then decodes with
all others of its replica; every prefill delays the others' tokens by the part of it that does not fit beside them.

    plan = estimate_serving(load_model("deepseek-v3"), load_cluster("8xH200"), ParallelLayout(tp=8),
                            prompt=1024, output=1024, concurrency=64, dtype="fp8", backend="sglang")
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from moesaic.errors import UserError
from moesaic.parallel.layout import ParallelLayout
from moesaic.plan.hardware import FORMAT_BYTES, Cluster
from moesaic.plan.serving.engines import load_engine
from moesaic.plan.serving.expected_error import expected_error
from moesaic.plan.serving.measured_tables import MeasuredTables
from moesaic.plan.serving.memory import CHUNK, buffer_bytes, sequence_bytes, sequences_that_fit, weight_bytes
from moesaic.plan.serving.step import Batch, Serving, StepTime
from moesaic.plan.shape import ModelShape

# Other names of number formats, as checkpoints and engines write them.
SAME = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "fp8_block": "fp8", "fp8_e4m3": "fp8", "nvfp4": "fp4",
        "mxfp4": "fp4", "int4_wo": "int4", "w4a16": "int4", "awq": "int4", "gptq": "int4"}  # fmt: skip


@dataclass(frozen=True)
class ServingPlan:
    ttft_ms: float
    tpot_ms: float
    output_tokens_per_second: float
    tokens_per_second_per_gpu: float  # output tokens, over all devices that take part
    requests_per_second: float
    concurrency: float  # requests under way; with a request rate, as many as it causes
    batch: float  # sequences that decode together in one replica of the attention
    devices: int
    memory_bytes: dict[str, float]  # of one device: weights, kv_cache (of this concurrency), buffers, total
    fits: bool
    sequences_that_fit: int  # under way at once, in all replicas
    bounds: dict[str, str]  # decode and prefill: bandwidth, compute, communication or launch
    decode_parts_ms: dict[str, float]
    prefill_parts_ms: dict[str, float]
    expected_error: float
    dollars_per_million_output_tokens: float


def estimate_serving(
    model: ModelShape,
    cluster: Cluster,
    layout: ParallelLayout,
    *,
    prompt: int,
    output: int,
    concurrency: int,
    dtype: str = "bf16",
    cache_dtype: str | None = None,
    backend: str = "typical",
    request_rate: float | None = None,
    prefill: ParallelLayout | None = None,
    prefix_share: float = 0.0,
    workers: int = 1,
    prefill_workers: int = 1,
    tokens_per_step: float = 1.0,
    tables: MeasuredTables | None = None,
) -> ServingPlan:
    """`layout` is one worker's; `workers` of them share the load. With `prefill`, that layout (times `prefill_workers`)
    prefills and `layout` only decodes. `prefix_share`: part of each prompt that is cached already. `tokens_per_step`:
    tokens a sequence gains per step, above one with speculative decoding. `tables`: measured expert
    layers (`measured_tables.find_tables()`), where there are any."""
    dtype = SAME.get(dtype.lower(), dtype)
    cache_dtype = SAME.get(cache_dtype.lower(), cache_dtype) if cache_dtype else None
    _check(prompt, output, concurrency, dtype, cache_dtype, prefix_share, request_rate)
    devices = layout.devices * workers + (prefill.devices * prefill_workers if prefill else 0)
    if devices > cluster.count:
        raise UserError(
            f"--layout {layout}", f"needs {devices} devices, the cluster has {cluster.count}",
            f"Take a cluster of {devices}x{cluster.device.name.upper()}, or a smaller layout.",
        )  # fmt: skip
    engine = load_engine(backend)
    cached = cache_dtype or engine.cache_dtype(dtype)
    serving = Serving(model, cluster.device, layout, engine, dtype, cached, tables)
    before = replace(serving, layout=prefill) if prefill else serving
    load = Load(serving, before, prompt, output, prefix_share, workers, prefill_workers, prefill is not None,
                 tokens_per_step)  # fmt: skip
    clients = load.clients_at(request_rate, concurrency) if request_rate else float(concurrency)
    ttft, tpot, batch = load.latency(clients)
    total = ttft + tpot * (output - 1)
    rate = clients * output / total
    decode, first = load.decode_step(batch), load.prefill_step()
    room = sequences_that_fit(serving, prompt + output / 2)  # at any moment some are short, some nearly done
    kept = sequence_bytes(serving, prompt + output / 2) * min(batch, max(room, 1))
    memory = {"weights": weight_bytes(serving), "kv_cache": kept, "buffers": buffer_bytes(serving, CHUNK)}
    memory["total"] = sum(memory.values())
    price = cluster.device.price * devices / 3600
    return ServingPlan(
        ttft_ms=ttft * 1e3,
        tpot_ms=tpot * 1e3,
        output_tokens_per_second=rate,
        tokens_per_second_per_gpu=rate / devices,
        requests_per_second=rate / output,
        concurrency=clients,
        batch=batch,
        devices=devices,
        memory_bytes=memory,
        fits=room >= 1,
        sequences_that_fit=room * layout.dp * workers,
        bounds={"decode": decode.bound, "prefill": first.bound},
        decode_parts_ms={name: seconds * 1e3 for name, seconds in decode.parts.items()},
        prefill_parts_ms={name: seconds * 1e3 for name, seconds in first.parts.items()},
        expected_error=expected_error(model, cluster.device, prefill is not None),
        dollars_per_million_output_tokens=price / rate * 1e6,
    )


@dataclass(frozen=True)
class Load:
    """Requests of one size on one way to serve."""

    serving: Serving
    before: Serving  # where prompts are prefilled
    prompt: int
    output: int
    prefix_share: float
    workers: int
    prefill_workers: int
    split: bool
    tokens_per_step: float

    @property
    def replicas(self) -> int:
        return self.serving.layout.dp * self.workers

    def decode_step(self, sequences: float) -> StepTime:
        """Each pipeline stage decodes its part of the sequences while the others decode theirs."""
        return self.serving.step(Batch(sequences / self.serving.layout.pp, self.prompt + self.output / 2))

    def prefill_step(self, prompts: float = 1.0) -> StepTime:
        """So many prompts in each replica."""
        fresh = max(1.0, self.prompt * (1 - self.prefix_share))
        return self.before.step(Batch(prompt_tokens=prompts * fresh, prompt_context=self.prompt - fresh / 2))

    def prefill_each(self, others: float) -> float:
        """Seconds of prefill per prompt: of `others` under way some come together and share a step, if short."""
        together = min(max(1.0, CHUNK / self.prompt), 1 + self.serving.engine.bunching * max(0.0, others))
        return self.prefill_step(together).seconds / together

    def latency(self, clients: float) -> tuple[float, float, float]:
        """(seconds to the first token, seconds per further token, sequences that decode together)."""
        return self._split(clients) if self.split else self._together(clients)

    def _together(self, clients: float) -> tuple[float, float, float]:
        engine = self.serving.engine
        each = clients / self.replicas
        room = max(1, min(sequences_that_fit(self.serving, self.prompt + self.output / 2), engine.running))
        batch = min(each, room)
        step = self.decode_step(batch).seconds / self.tokens_per_step
        prefill = self.prefill_each(batch - 1)
        others = max(0.0, batch - 1) * prefill * (1 - engine.mixed) / self.serving.layout.pp
        tpot = step + others * (1 - engine.bunching) / max(1, self.output)
        ttft = engine.first + prefill + step / 2 + others * engine.bunching
        service = ttft + tpot * (self.output - 1)
        return ttft + (each / batch - 1) * service, tpot, batch

    def _split(self, clients: float) -> tuple[float, float, float]:
        engine = self.serving.engine
        servers = self.before.layout.dp * self.before.layout.pp * self.prefill_workers
        prefill = self.prefill_each(clients / servers - 1)
        room = max(1, min(sequences_that_fit(self.serving, self.prompt + self.output / 2), engine.running))
        low, high = 0.0, min(clients / self.replicas, room)
        # The batch for which as many requests wait for or undergo prefill as do not decode.
        for _ in range(40):
            batch = (low + high) / 2
            decoding = self.decode_step(batch).seconds / self.tokens_per_step * self.output
            arriving = batch * self.replicas / decoding
            waiting = (clients - batch * self.replicas) / arriving
            wanted = prefill * (1 + engine.bunching * max(0.0, clients / servers - 1))
            enough = waiting >= wanted and arriving * prefill <= servers
            low, high = (batch, high) if enough else (low, batch)
        step = self.decode_step(batch).seconds / self.tokens_per_step
        transfer = self._transfer()
        arriving = batch * self.replicas / (step * self.output)
        ttft = max(clients / arriving - step * self.output, prefill) + engine.first + transfer
        return ttft, step, batch

    def _transfer(self) -> float:
        """The prompt's KV cache to the device that decodes, over the network between nodes."""
        device = self.serving.device
        return sequence_bytes(self.before, self.prompt) / (device.network * device.network_share)

    def clients_at(self, rate: float, most: int) -> float:
        """Requests under way when `rate` come per second (Little's law), `most` at most."""
        low, high = 0.0, float(most)
        for _ in range(60):
            clients = (low + high) / 2
            ttft, tpot, _ = self.latency(max(clients, 1e-3))
            low, high = (clients, high) if clients < rate * (ttft + tpot * (self.output - 1)) else (low, clients)
        return max(high, 1e-3)


def _check(
    prompt: int,
    output: int,
    concurrency: int,
    dtype: str,
    cache_dtype: str | None,
    prefix_share: float,
    request_rate: float | None,
) -> None:
    for name, value in (("--in", prompt), ("--out", output), ("--concurrency", concurrency)):
        if value < 1:
            raise UserError(f"{name} {value}", "must be at least 1")
    for flag, form in (("--dtype", dtype), ("--cache-dtype", cache_dtype)):
        if form is not None and form not in FORMAT_BYTES:
            raise UserError(f"{flag} {form}", "unknown number format", f"Known are {', '.join(FORMAT_BYTES)}.")
    if not 0 <= prefix_share < 1:
        raise UserError(f"prefix share {prefix_share}", "must lie from 0 to below 1")
    if request_rate is not None and request_rate <= 0:
        raise UserError(f"request rate {request_rate}", "must be above 0")
