"""Rows of `bench/serve_offload.py` on a CPU: a process for each, which take turns."""

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
from pathlib import Path
from typing import Any

import torch

from bench.offload_decoding import (
    GIB,
    KINDS,
    Decoding,
    config_of,
    counted,
    fetched,
    greedy_tokens,
    report,
    resident,
    sizes,
)
from moesaic.kernels import hardware
from moesaic.model.directory import load, save
from moesaic.model.transformer import Model
from moesaic.serve.offload.expert_store import DiskExperts
from moesaic.serve.offload.experts import OffloadedExperts
from moesaic.serve.offload.loading import load_served
from moesaic.serve.offload.weights import streamed_layers

TINY_SHAPE = dict(layers=4, hidden=256, experts=16, per_token=4, width=128, heads=(4, 2, 64), vocab=512)


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
