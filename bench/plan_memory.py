"""What training and serving really hold in memory beside what `moesaic plan` says, configuration by configuration.

    python -m bench.plan_memory               this machine: the CPU's small cases, and the GPU's where there is one
    python -m bench.plan_memory --detail      with the planner's parts, and what a GPU holds
    python -m bench.plan_memory --work serving --device cuda

Training: two steps of the product's own trainer parts (model, optimizer, recomputation), the peak of the second. On a
GPU that is the allocator's own peak; on a CPU torch's MemTracker counts the bytes of living tensors. Serving: an engine
with room for the cases' requests, its peak while they decode; on a GPU all that the device holds for its process.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import weakref
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from bench.measure import record
from bench.random_weights import random_model
from moesaic.model.config import Dense, Experts, GroupedQuery, Latent, Layer, ModelConfig, Rope
from moesaic.model.layout import Layout
from moesaic.plan.own_models import from_config
from moesaic.plan.training.own_memory import OwnTrainer, ServingMemory, own_serving_memory, own_training_memory
from moesaic.train.compile import compile_blocks
from moesaic.train.layer_runners.recompute import recompute as recomputed
from moesaic.train.optimizers.adamw import AdamW


@dataclass(frozen=True)
class Case:
    name: str
    config: ModelConfig
    sequences: int
    length: int
    recompute: bool = False


def grouped(
    layers: int, hidden: int, heads: int, kv_heads: int, ffn: Dense | Experts, vocab: int, dtype: str, head: int = 64
) -> ModelConfig:
    return ModelConfig(
        family="qwen3_moe" if isinstance(ffn, Experts) else "qwen3", vocab=vocab, hidden=hidden,
        attention=GroupedQuery(heads, kv_heads, head, qk_norm=True), rope=Rope(head, theta=1e6),
        layers=(Layer(ffn),) * layers, context=8192, dtype=dtype,  # type: ignore[arg-type]
    )  # fmt: skip


def latent(layers: int, hidden: int, heads: int, ffn: Dense | Experts, vocab: int, dtype: str) -> ModelConfig:
    return ModelConfig(
        family="deepseek_v3", vocab=vocab, hidden=hidden,
        attention=Latent(heads, 512 if hidden >= 1024 else 32, 128 if hidden >= 1024 else 32,
                         64 if hidden >= 1024 else 16, 128 if hidden >= 1024 else 32, 1536 if hidden >= 1024 else 64),
        rope=Rope(64 if hidden >= 1024 else 16), layers=(Layer(ffn),) * layers, context=8192,
        dtype=dtype,  # type: ignore[arg-type]
    )  # fmt: skip


SMALL = [
    Case("dense", grouped(4, 256, 4, 2, Dense(768), 2048, "float32"), 4, 128),
    Case("dense, recompute", grouped(4, 256, 4, 2, Dense(768), 2048, "float32"), 8, 128, True),
    Case("mixture", grouped(4, 256, 4, 2, Experts(16, 4, 128), 2048, "float32"), 4, 128),
    Case("mixture, long batch", grouped(4, 256, 4, 2, Experts(16, 4, 128), 2048, "float32"), 16, 128),
    Case("latent mixture", latent(4, 256, 4, Experts(16, 4, 128, shared_hidden=128), 2048, "float32"), 4, 128),
]
QWEN, FINE = Experts(64, 8, 768), Experts(64, 6, 1408, shared_hidden=2816)
DENSE_1B = grouped(16, 2048, 16, 8, Dense(8192), 32000, "bfloat16", 128)
MIXTURE_5B, MIXTURE_3B = (grouped(layers, 2048, 32, 4, QWEN, 32000, "bfloat16", 128) for layers in (16, 8))
LATENT_5B = latent(8, 2048, 16, FINE, 32000, "bfloat16")
LARGE = [
    Case("dense 1.2B", DENSE_1B, 4, 4096),
    Case("dense 1.2B, recompute", DENSE_1B, 16, 4096, True),
    Case("mixture 5.3B", MIXTURE_5B, 4, 4096),
    Case("mixture 5.3B, recompute", MIXTURE_5B, 8, 4096, True),
    Case("mixture 2.7B, batch 8", MIXTURE_3B, 8, 4096),
    Case("latent mixture", LATENT_5B, 4, 4096),
    Case("latent mixture, recompute", LATENT_5B, 8, 4096, True),
]


def train(case: Case, device: torch.device) -> float:
    """Peak bytes of the second step."""
    model = random_model(case.config, device)
    optimizer = AdamW().build(model.named_parameters())
    if device.type == "cuda":
        compile_blocks(model)
    layout = Layout([case.length] * case.sequences, device=device)
    count = case.sequences * case.length
    scale_T = torch.full((count,), 1 / count, device=device)
    tokens_T = torch.randint(case.config.vocab, (count,), device=device)

    def step() -> None:
        options = {"runner": recomputed} if case.recompute else {}
        hidden_TD = model(tokens_T, layout, **options)
        loss, _ = model.cross_entropy(hidden_TD, tokens_T.roll(-1), scale_T)
        loss.backward()
        optimizer.step(1.0, clip=1.0)
        model.zero_grad(set_to_none=True)

    step()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        return float(torch.cuda.max_memory_allocated())
    from torch.distributed._tools.mem_tracker import MemTracker

    tracker = MemTracker()
    kept = [tensor for slot in optimizer.slots for tensor in (slot.weight, *slot.state.values())]
    tracker.track_external(model, *kept)
    with tracker:
        step()
    return float(tracker.get_tracker_snapshot("peak")[device]["Total"])


@dataclass(frozen=True)
class Serving:
    name: str
    config: ModelConfig
    requests: int
    prompt: int
    output: int


SERVED = {
    "cpu": [
        Serving("dense", SMALL[0].config, 16, 96, 16),
        Serving("mixture", SMALL[2].config, 32, 200, 24),
        Serving("latent mixture", SMALL[4].config, 32, 200, 24),
    ],
    "cuda": [
        Serving("dense 1.2B", DENSE_1B, 64, 1024, 64),
        Serving("mixture 5.3B", MIXTURE_5B, 128, 2048, 64),
        Serving("latent mixture", LATENT_5B, 64, 4096, 64),
    ],
}
STEP = {"cpu": 512, "cuda": 8192}  # tokens of a step


def serve(case: Serving, device: torch.device, detail: bool = False) -> float:
    """Peak bytes while the requests are prefilled and decode."""
    from moesaic.serve.core.engine import Engine
    from moesaic.serve.core.scheduling_policies.chunked import Chunked

    model = random_model(case.config, device)
    shape = from_config(case.config, case.name)
    pages = -(-(case.prompt + case.output) // 16) * case.requests
    cache = model.dtype.itemsize * shape.cache_width() * 16 * pages
    limit = Chunked(tokens=STEP[device.type])
    engine = Engine(model, cache_bytes=cache, max_requests=case.requests, policy=limit, seed=0)
    prompts = [torch.randint(5, case.config.vocab, (case.prompt,)).tolist() for _ in range(case.requests)]
    if device.type == "cuda":
        before = torch.cuda.memory_allocated()
        engine.generate(prompts, max_tokens=case.output, temperature=0.0)
        free, total = torch.cuda.mem_get_info()
        if detail:
            held = {"weights and cache": before, "most": torch.cuda.max_memory_allocated(), "graphs": graph_bytes()}
            outside = total - free - torch.cuda.memory_reserved()
            held |= {"after": torch.cuda.memory_allocated(), "outside the allocator": outside}
            print("       held", {name: f"{size / 1e6:,.1f}" for name, size in held.items()}, flush=True)
        return float(total - free)
    kept = [tensor for layer in engine.cache.layers for tensor in layer.values()]
    with LivingTensors([*model.parameters(), *kept]) as living:
        engine.generate(prompts, max_tokens=case.output, temperature=0.0)
    return float(living.peak)


def graph_bytes() -> int:
    """Of the allocator's segments that belong to CUDA graphs, used or not: nobody else can have them."""
    return sum(one["total_size"] for one in torch.cuda.memory_snapshot() if tuple(one["segment_pool_id"]) != (0, 0))


class LivingTensors(TorchDispatchMode):
    """Bytes of storages that operations made and that are still alive: torch's trackers follow one forward only."""

    def __init__(self, before: list[torch.Tensor]) -> None:
        super().__init__()
        self.known: dict[int, int] = {}
        self.now = self.peak = 0
        for tensor in before:
            self.add(tensor)

    def add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        place, size = storage.data_ptr(), storage.nbytes()
        if size and place not in self.known:
            self.known[place] = size
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self.drop, place)

    def drop(self, place: int) -> None:
        self.now -= self.known.pop(place, 0)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        tree_map_only(torch.Tensor, self.add, result)
        return result


def planned_serving(case: Serving, device: str) -> ServingMemory:
    shape = from_config(case.config, case.name)
    tokens = case.prompt + case.output
    return own_serving_memory(shape, case.config.dtype, device, case.requests, tokens, STEP[device])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--detail", action="store_true")
    parser.add_argument("--work", choices=["training", "serving"], help="default: both")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: both, where there is a GPU")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []

    def compare(work: str, device: str, name: str, measured: float, planned: float) -> None:
        error = planned / measured - 1
        rows.append(
            {"work": work, "device": device, "case": name, "measured": measured, "planned": planned, "error": error}
        )
        sizes = f"measured {measured / 1e6:10,.1f} MB  planned {planned / 1e6:10,.1f} MB"
        print(f"{work:8} {device:5} {name:28} {sizes}  {error:+.1%}", flush=True)
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    devices = [torch.device("cpu")] + ([torch.device("cuda", 0)] if torch.cuda.is_available() else [])
    devices = [device for device in devices if options.device in (None, device.type)]
    for device in devices if options.work != "serving" else []:
        for case in LARGE if device.type == "cuda" else SMALL:
            trainer = OwnTrainer(case.config.dtype, case.recompute, device.type)
            shape = from_config(case.config, case.name)
            planned = own_training_memory(shape, trainer, case.sequences, case.length)
            compare("training", device.type, case.name, train(case, device), planned.total)
            if options.detail:
                print("      ", {name: f"{size / 1e6:,.1f}" for name, size in planned.parts().items()})
    for device in devices if options.work != "training" else []:
        for served in SERVED[device.type]:
            plan = planned_serving(served, device.type)
            with ProcessPoolExecutor(
                1, mp_context=get_context("spawn")
            ) as alone:  # all that its device holds is its own
                measured = alone.submit(serve, served, device, options.detail).result()
            compare("serving", device.type, served.name, measured, plan.total)
            if options.detail:
                print("       planned", {name: f"{size / 1e6:,.1f}" for name, size in asdict(plan).items()})
    worst = max(abs(row["error"]) for row in rows)
    print(f"median {statistics.median(abs(row['error']) for row in rows):.1%}, worst {worst:.1%} of {len(rows)}")
    record("plan_memory", rows)


if __name__ == "__main__":
    main()
