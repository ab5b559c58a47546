"""Serving with experts, or all layers, outside the memory that computes: tokens/s and memory against all in memory.

    python -m bench.serve_offload                       on a CPU from disk, some minutes
    python -m bench.serve_offload --device cuda         on an H200 with 128 GiB of host memory, below six minutes
    python -m bench.serve_offload --device cuda --rows large          only the model that does not fit
    python -m bench.serve_offload --device cuda --tiny  the same program in seconds, to see that it runs

Rows: `memory` has all weights where they compute; `experts-N` a cache of N % of the experts; `weights` streams layers.
One stream and a batch decode after short prompts, sampled at temperature 1: greedily, a model of random weights soon
repeats itself, and its experts. Every row must give the greedy tokens of `memory` for a few prompts: it is checked.
Weights are random, so experts are chosen evenly, and without predictions a cache of N % would hit little more than N %:
trained routers are more uneven. How well the next layer's router predicts is a property of these weights too.

On a CPU each row is a process of its own, and they take turns: `ratio` is the median over rounds of a row's tokens/s by
those of `memory` in the same round, tokens/s are those of the best round. A row's memory is how far its peak resident
size grew from before the model was loaded. Files lie in the page cache, so "disk" is a copy from there; rows `-cold`
make it forget what they have read.

On a GPU the model has the shape of Qwen3-30B-A3B (57 GiB in bf16), experts wait in pinned host memory, and each row is
held to a smaller GPU's memory (`gpu_gib`, torch.cuda.set_per_process_memory_fraction), as all of it would fit on an
H200. Row `large` truly does not fit: 148 GiB of GLM-4.5-Air's shape with 35 layers, part of its experts on the GPU only
and the others in host memory.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from bench.measure import machine, record
from moesaic.kernels import hardware
from moesaic.model.config import Experts, GroupedQuery, Layer, ModelConfig, Rope
from moesaic.model.directory import load, save
from moesaic.model.experts import MixtureFeedForward
from moesaic.model.transformer import Model
from moesaic.serve.core.engine import Engine
from moesaic.serve.core.request import Sampling
from moesaic.serve.offload.expert_loading import mixtures, offload_experts
from moesaic.serve.offload.expert_store import DiskExperts, HostExperts
from moesaic.serve.offload.experts import OffloadedExperts
from moesaic.serve.offload.layer_loading import stream_layers
from moesaic.serve.offload.layer_store import laid_out
from moesaic.serve.offload.loading import load_served
from moesaic.serve.offload.weights import leaves_of, streamed_layers, tensors_of

GIB = 2**30
CPU_ROWS = [
    "memory", "experts-100", "experts-50", "experts-25", "experts-12", "experts-25-cold", "weights", "weights-cold",
]  # fmt: skip
GPU_ROWS = ["memory", "experts-100", "experts-50", "experts-25", "experts-12", "weights", "large"]
CPU_SHAPE = dict(layers=12, hidden=512, experts=32, per_token=4, width=512, heads=(8, 2, 64), vocab=8192)
GPU_SHAPE = dict(layers=48, hidden=2048, experts=128, per_token=8, width=768, heads=(32, 4, 128), vocab=32000)
LARGE_SHAPE = dict(layers=35, hidden=4096, experts=128, per_token=8, width=1408, heads=(96, 8, 128), vocab=32000)
TINY_SHAPE = dict(layers=4, hidden=256, experts=16, per_token=4, width=128, heads=(4, 2, 64), vocab=512)


def config_of(shape: dict[str, Any], dtype: str) -> ModelConfig:
    heads, kv_heads, size = shape["heads"]
    return ModelConfig(
        family="qwen3_moe",
        vocab=shape["vocab"],
        hidden=shape["hidden"],
        attention=GroupedQuery(heads, kv_heads, size, qk_norm=True),
        rope=Rope(size, theta=1e6),
        layers=tuple(
            Layer(Experts(shape["experts"], shape["per_token"], shape["width"])) for _ in range(shape["layers"])
        ),
        context=1024,
        dtype=dtype,  # type: ignore[arg-type]
    )


class Decoding:
    """An engine and prompts for it, which decode again and again."""

    def __init__(self, model: Model, options: argparse.Namespace, batch: int) -> None:
        gc.unfreeze()
        gc.collect()  # what an earlier engine held
        self.engine = Engine(model, cache_bytes=int(options.cache_gib * GIB), max_requests=batch, seed=0)
        generator, vocab = torch.Generator().manual_seed(7), model.config.vocab
        self.prompts = [torch.randint(vocab, (options.prompt,), generator=generator).tolist() for _ in range(batch)]
        if batch == 1:
            self.engine.warm_up()
        self.run(2)  # compile, fill caches

    def run(self, count: int) -> float:
        """Tokens a second after the last prompt was read."""
        sampling = Sampling(max_tokens=count, temperature=1.0, ignore_eos=True)
        requests = [self.engine.request(prompt, sampling) for prompt in self.prompts]
        self.engine.complete(requests)
        first, last = max(r.first_token for r in requests), max(r.last_token for r in requests)  # type: ignore[type-var]
        return len(requests) * (count - 1) / max(last - first, 1e-9)  # type: ignore[operator]


def greedy_tokens(model: Model) -> list[list[int]]:
    prompts = [[(7 * n + 11 * at) % model.config.vocab for at in range(5 + 9 * n)] for n in range(4)]
    engine = Engine(model, cache_bytes=1 << 27, max_requests=4, seed=0)
    done = engine.generate(prompts, max_tokens=12, temperature=0.0, ignore_eos=True)
    return [list(one.tokens) for one in done]


KINDS = ("one", "batch")


def sizes(options: argparse.Namespace) -> dict[str, tuple[int, int]]:
    """Sequences, and tokens that each generates."""
    return {"one": (1, options.tokens), "batch": (options.batch, options.batch_tokens)}


def counted(model: Model) -> dict[str, float]:
    return dict(vars(model.ops.counts)) if isinstance(model.ops, OffloadedExperts) else {}


def fetched(name: str, before: dict[str, float], after: dict[str, float], tokens: int) -> dict[str, Any]:
    """Rates of hits and right predictions, and bytes a generated token."""
    if not after:
        return {}
    new = {key: value - before[key] for key, value in after.items()}
    return {
        f"{name}_hit_rate": round(new["hits"] / max(1, new["wanted"]), 3),
        f"{name}_predicted": round(new["predicted"] / max(1, new["predictable"]), 3),
        f"{name}_fetched_mib_per_token": round(new["bytes"] / 2**20 / tokens, 2),
    }


def measured(model: Model, options: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {"greedy_tokens": greedy_tokens(model)}
    for name, (batch, tokens) in sizes(options).items():
        decoding = Decoding(model, options, batch)
        before = counted(model)
        rates = [decoding.run(tokens) for _ in range(options.rounds)]
        found[f"{name}_tokens_per_second"] = round(max(rates), 2)
        found |= fetched(name, before, counted(model), options.rounds * batch * tokens)
    return found


# On a CPU


def save_model(directory: Path, shape: dict[str, Any]) -> None:
    with torch.device("meta"):
        model = Model(config_of(shape, "float32"))
    model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.02, generator=generator)
        else:
            parameter.data.fill_(1.0)
    save(model, directory)


def resident(field: str = "VmHWM") -> int:
    """Bytes of this process's memory, by default the most there were."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024


def forget_peak() -> int:
    """Count the most memory from now on; how much there is now."""
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


class Cold:
    """After every read, the page cache forgets a model's files."""

    def __init__(self, store: Any, directory: Path) -> None:
        self.store = store
        self.files = [os.open(path, os.O_RDONLY) for path in directory.glob("*.safetensors")]
        self.drop()

    def drop(self) -> None:
        for file in self.files:
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)

    def read(self, *given: Any) -> None:
        self.store.read(*given)
        self.drop()


def cpu_row(options: argparse.Namespace, row: str, directory: Path) -> None:
    """A row's process: it loads, says so, and then decodes whenever it is told to."""
    torch.set_num_threads(hardware.threads())
    kind, _, share = row.removesuffix("-cold").partition("-")
    warm = load(directory.with_name("tiny"), threads=torch.get_num_threads())  # code and libraries are no weights
    Decoding(warm, argparse.Namespace(cache_gib=0.01, prompt=8), 1)
    del warm
    gc.collect()
    before, begun, shape = forget_peak(), time.perf_counter(), options.shape
    experts = shape["layers"] * shape["experts"] * 3 * shape["hidden"] * shape["width"] * 4
    if kind == "memory":
        model = load(directory)
    elif kind == "experts":
        model = load_served(directory, offload="experts", expert_cache_bytes=experts * int(share) // 100)
    else:
        model = load_served(directory, offload="weights")
    found: dict[str, Any] = {"row": row, "load_seconds": round(time.perf_counter() - begun, 1)}
    if row.endswith("-cold"):
        chill(model, directory)
    found["greedy_tokens"] = greedy_tokens(model)
    decodings = {name: Decoding(model, options, batch) for name, (batch, _) in sizes(options).items()}
    print("ready", flush=True)
    rounds = 0
    totals: dict[str, list[dict[str, float]]] = {name: [] for name in KINDS}
    while sys.stdin.readline().strip() == "round":
        rounds += 1
        rates = {}
        for name, (_, tokens) in sizes(options).items():
            totals[name].append(counted(model))
            rates[name] = decodings[name].run(tokens)
            totals[name].append(counted(model))
        print(json.dumps(rates), flush=True)
    for name, (batch, tokens) in sizes(options).items():
        sums = [{key: sum(one[key] for one in totals[name][start::2]) for key in totals[name][0]} for start in (0, 1)]
        found |= fetched(name, *sums, rounds * batch * tokens)
    print(json.dumps(found | {"peak_gib": round((resident() - before) / GIB, 3)}), flush=True)


def chill(model: Model, directory: Path) -> None:
    if isinstance(model.ops, OffloadedExperts):
        stores = {id(layer.slots): layer.slots for layer in model.ops.layers.values()}.values()
        cold = Cold(next(iter(stores)).store, directory)
        assert isinstance(cold.store, DiskExperts)
        for slots in stores:
            slots.store = cold
        return
    streamed = streamed_layers(model.layers)
    assert streamed is not None
    streamed.store = Cold(streamed.store, directory)


def on_cpu(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows take turns, so that a busy moment of the machine hits all alike; cold ones by themselves, since they would
    make the others cold."""
    with tempfile.TemporaryDirectory(dir=options.folder or None) as folder:
        save_model(Path(folder) / "model", options.shape)
        save_model(Path(folder) / "tiny", TINY_SHAPE)
        command = [sys.executable, "-m", "bench.serve_offload", *sys.argv[1:], "--folder", folder, "--row"]
        rows: list[dict[str, Any]] = []
        cold = [row for row in options.rows if row.endswith("-cold")]
        for group in ([row for row in options.rows if row not in cold], ["memory", *cold] if cold else []):
            children = {}
            for row in group:
                pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
                children[row] = subprocess.Popen([*command, row], **pipes)
                assert children[row].stdout.readline().strip() == "ready", row  # type: ignore[union-attr]
            rates: dict[str, list[dict[str, float]]] = {row: [] for row in group}
            for _ in range(options.rounds):
                for row, child in children.items():
                    print("round", file=child.stdin, flush=True)
                    rates[row].append(json.loads(child.stdout.readline()))  # type: ignore[union-attr]
            for row, child in children.items():
                found = json.loads(child.communicate("end\n")[0])
                for kind in KINDS:
                    found[f"{kind}_tokens_per_second"] = round(max(rate[kind] for rate in rates[row]), 2)
                    pairs = zip(rates[row], rates.get("memory", rates[row]), strict=True)
                    found[f"{kind}_ratio"] = round(statistics.median(own[kind] / base[kind] for own, base in pairs), 3)
                if row != "memory" or not rows:
                    rows.append(found)
                    report(rows)
        return rows


# On a GPU


class HostLayersOfExperts:
    """Layers for streaming out of a store of experts and small tensors beside it: nothing is in host memory twice."""

    def __init__(self, model: Model, experts: HostExperts, others: dict[str, Tensor]) -> None:
        self.experts, self.layers = experts, []
        for number, block in enumerate(model.layers):
            paths = {id(module): path for path, module in block.named_modules()}
            names = [f"layers.{number}.{paths[id(leaf.module)]}.{leaf.name}" for leaf in leaves_of(block)]
            self.layers.append((tensors_of(block), [self._source(number, name, others) for name in names]))

    def _source(self, number: int, name: str, others: dict[str, Tensor]) -> Tensor:
        if name.endswith("gate_up_EGD"):
            return self.experts.layers[number][0]
        return self.experts.layers[number][1] if name.endswith("down_EDF") else others[name]

    def read(self, number: int, memory: Tensor) -> None:
        shapes, sources = self.layers[number]
        for view, source in zip(laid_out(memory, shapes), sources, strict=True):
            view.copy_(source, non_blocking=True)


def blank(config: ModelConfig, dtype: torch.dtype) -> Model:
    with torch.device("meta"):
        return Model(config).to(dtype)


@torch.no_grad()
def fill_others(model: Model, device: torch.device, others: dict[str, Tensor] | None = None) -> int:
    """All but experts, from the host, or made on the device when they are first wanted; their bytes."""
    generator, total = torch.Generator(device).manual_seed(1), 0
    for name, parameter in list(model.named_parameters()):
        if name.endswith(("gate_up_EGD", "down_EDF")):
            continue
        made = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        total += made.numel() * made.element_size()
        if others is not None and name in others:
            made.copy_(others[name])
        else:
            made.normal_(0, 0.02, generator=generator) if made.dim() > 1 else made.fill_(1.0)
        if others is not None and name not in others:
            others[name] = made.cpu().pin_memory() if device.type == "cuda" else made.clone()
        path, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(path), leaf, torch.nn.Parameter(made, requires_grad=False))
    return total


@torch.no_grad()
def host_experts(model: Model, device: torch.device, fixed: int = 0) -> HostExperts:
    """Random experts, made on the device and copied to where they will wait."""
    store = HostExperts(pinned=device.type == "cuda", fixed=fixed)
    generator = torch.Generator(device).manual_seed(2)
    for block in mixtures(model).values():
        ffn = cast(MixtureFeedForward, block.ffn)
        matrices = (ffn.gate_up_EGD, ffn.down_EDF)
        for host in store.add_layer(len(matrices[0]), [(tuple(m.shape[1:]), m.dtype) for m in matrices]):
            host.copy_(torch.empty(host.shape, dtype=host.dtype, device=device).normal_(0, 0.02, generator=generator))
    return store


def link_rate(store: HostExperts, device: torch.device) -> float:
    """Bytes a second from pinned memory to the device."""
    source = store.layers[0][0]
    there = torch.empty(source.shape, dtype=source.dtype, device=device)
    there.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(4):
        there.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    return 4 * source.numel() * source.element_size() / (time.perf_counter() - begun)


def limit_gpu(gib: float | None) -> None:
    """Hold PyTorch to a smaller GPU's memory."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(1.0 if gib is None else min(1.0, gib * GIB / total))


def in_processes(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The model that does not fit has the host's memory for itself."""
    rows: list[dict[str, Any]] = []
    started = time.perf_counter()
    groups = [[row for row in options.rows if row != "large"], [row for row in options.rows if row == "large"]]
    for group in filter(None, groups):
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "rows.json"
            left = options.limit - (time.perf_counter() - started)
            command = [sys.executable, "-m", "bench.serve_offload", *sys.argv[1:], "--out", str(out)]
            done = subprocess.run([*command, "--limit", str(left), "--rows", *group])
            rows += json.loads(out.read_text()) if out.exists() else [{"row": group[0], "exit": done.returncode}]
    return rows


def on_gpu(options: argparse.Namespace) -> list[dict[str, Any]]:
    started = time.perf_counter()
    device = torch.device(options.device)
    dtype, cuda = torch.bfloat16 if device.type == "cuda" else torch.float32, device.type == "cuda"
    config, others, rows = config_of(options.shape, str(dtype).removeprefix("torch.")), {}, []
    store: HostExperts | None = None

    def done(row: str, model: Model, begun: float, facts: dict[str, Any]) -> None:
        built = time.perf_counter() - begun
        found = {"row": row, "load_seconds": round(built, 1), **measured(model, options), **facts}
        if cuda:
            found["gpu_peak_gib"] = round(torch.cuda.max_memory_allocated() / GIB, 1)
        found["host_peak_gib"] = round(resident() / GIB, 1)
        rows.append(found)
        report(rows)

    for row in options.rows:
        if time.perf_counter() - started > options.limit:
            rows.append({"row": row, "skipped": f"{options.limit:g} s are over"})
            continue
        begun = time.perf_counter()
        gc.unfreeze()
        gc.collect()
        limit_gpu(None)
        if row == "large":
            done(row, *large(options, device, dtype))
            continue
        model = blank(config, dtype)
        if store is None:
            store = host_experts(model, device)
            print(f"experts in host memory after {time.perf_counter() - begun:.0f} s", flush=True)
            if cuda:
                print(f"the link copies {link_rate(store, device) / 1e9:.1f} GB/s", flush=True)
        rest = fill_others(model, device, others)
        experts = sum(t.numel() * t.element_size() for layer in store.layers for t in layer)
        facts: dict[str, Any] = {"experts_gib": round(experts / GIB, 1), "others_gib": round(rest / GIB, 1)}
        kind, _, share = row.partition("-")
        if kind == "memory":
            all_on(device, model, store)
        elif kind == "experts":
            budget = experts * int(share) // 100
            # The cache, the rest, the KV cache, and room for a batch's rows.
            facts["gpu_gib"] = round((budget + rest) / GIB + options.cache_gib + 3)
            limit_gpu(facts["gpu_gib"])
            offload_experts(model, store, budget)
        else:
            layer = (experts + rest) // len(config.layers)
            facts["gpu_gib"] = round((2 * layer + rest) / GIB + options.cache_gib + 3)
            limit_gpu(facts["gpu_gib"])
            stream_layers(model, HostLayersOfExperts(model, store, others))
        done(row, model, begun, facts)
        del model
    return rows


def all_on(device: torch.device, model: Model, store: HostExperts) -> None:
    for block, tensors in zip(mixtures(model).values(), store.layers, strict=True):
        for name, tensor in zip(("gate_up_EGD", "down_EDF"), tensors, strict=True):
            setattr(block.ffn, name, torch.nn.Parameter(tensor.to(device, copy=True), requires_grad=False))


def large(options: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> tuple[Model, float, dict[str, Any]]:
    """Of every layer's experts the first are on the GPU only, the others in host memory and by turns on the GPU."""
    begun = time.perf_counter()
    shape = options.large_shape
    config = config_of(shape, str(dtype).removeprefix("torch."))
    model = blank(config, dtype)
    fixed, cached = (shape["experts"] * part // 128 for part in (options.fixed, options.cached))
    store = host_experts(model, device, fixed)
    rest = fill_others(model, device)
    host = sum(t.numel() * t.element_size() for layer in store.layers for t in layer)
    one = 3 * shape["hidden"] * shape["width"] * dtype.itemsize
    experts = offload_experts(model, store, shape["layers"] * cached * one, fixed=fixed)
    generator = torch.Generator(device).manual_seed(3)
    for layer in experts.layers.values():
        for tensor in layer.slots.tensors:
            tensor[:fixed].normal_(0, 0.02, generator=generator)
    total = shape["layers"] * shape["experts"] * one + rest
    facts = {
        "model_gib": round(total / GIB, 1),
        "host_gib": round(host / GIB, 1),
        "cache_gib": round(shape["layers"] * cached * one / GIB, 1),
    }
    if device.type == "cuda":
        facts["gpu_gib"] = round(torch.cuda.get_device_properties(0).total_memory / GIB, 1)
        facts["fits"] = total < torch.cuda.get_device_properties(0).total_memory
    return model, begun, facts


# Both


def report(rows: Sequence[dict[str, Any]]) -> None:
    """The newest row, beside `memory`."""
    row = rows[-1]
    base = next((one for one in rows if one["row"] == "memory" and "greedy_tokens" in one), None)
    if "greedy_tokens" not in row:
        print(json.dumps(row), flush=True)
        return
    if base is not None and row["row"] != "large":
        row["same_tokens"] = row["greedy_tokens"] == base["greedy_tokens"]
        for kind in KINDS:
            ratio = row[f"{kind}_tokens_per_second"] / base[f"{kind}_tokens_per_second"]
            row.setdefault(f"{kind}_ratio", round(ratio, 3))
    print(json.dumps({key: value for key, value in row.items() if key != "greedy_tokens"}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rows", nargs="*")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=64, help="that one stream generates")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--batch-tokens", type=int, default=9, help="that each sequence of a batch generates")
    parser.add_argument("--rounds", type=int, help="of which the best counts")
    parser.add_argument("--cache-gib", type=float, help="of the KV cache")
    parser.add_argument("--fixed", type=int, default=44, help="experts of 128 that row large has on the GPU only")
    parser.add_argument("--cached", type=int, default=96, help="experts of 128 for which row large has room on the GPU")
    parser.add_argument("--limit", type=float, default=300, help="seconds after which no further row begins, on a GPU")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--in-process", action="store_true", help="run the GPU's program on a CPU")
    parser.add_argument("--no-record", action="store_true", help="print only")
    parser.add_argument("--folder", help="for the model on a CPU")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    options = parser.parse_args()
    gpu = options.device.startswith("cuda") or options.in_process
    options.shape = TINY_SHAPE if options.tiny else GPU_SHAPE if gpu else CPU_SHAPE
    options.large_shape = TINY_SHAPE if options.tiny else LARGE_SHAPE
    options.rows = options.rows or (GPU_ROWS if gpu else CPU_ROWS)
    options.batch = options.batch or (64 if gpu and not options.tiny else 16)
    options.rounds = options.rounds or (1 if gpu else 3)
    options.cache_gib = options.cache_gib or (2.0 if gpu and not options.tiny else 0.125)
    if options.row:
        cpu_row(options, options.row, Path(options.folder) / "model")
        return
    if options.out:
        Path(options.out).write_text(json.dumps(on_gpu(options)))
        return
    rows = in_processes(options) if gpu else on_cpu(options)
    kept = [{key: value for key, value in row.items() if key != "greedy_tokens"} for row in rows]
    facts = {name: getattr(options, name) for name in ("shape", "prompt", "tokens", "batch", "rounds")}
    if not options.no_record and not options.tiny:
        print(
            record(
                "serve_offload_gpu" if gpu else "serve_offload_cpu",
                kept,
                **facts,
                batch_tokens=options.batch_tokens,
                load_average=round(os.getloadavg()[1], 1),
            )
        )
    else:
        print(json.dumps(machine()))
    if not all(row.get("same_tokens", True) for row in rows):
        sys.exit("a row gave other tokens than memory")


if __name__ == "__main__":
    main()
