"""Rows of `bench/serve_offload.py` on a GPU: experts in pinned host memory, each row held to a smaller GPU's memory."""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from bench.offload_decoding import GIB, config_of, measured, report, resident
from moesaic.model.config import ModelConfig
from moesaic.model.experts import MixtureFeedForward
from moesaic.model.transformer import Model
from moesaic.serve.offload.expert_loading import mixtures, offload_experts
from moesaic.serve.offload.expert_store import HostExperts
from moesaic.serve.offload.layer_loading import stream_layers
from moesaic.serve.offload.layer_store import laid_out
from moesaic.serve.offload.weights import leaves_of, tensors_of


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
