"""Load the model that is served: one engine in this process, on a GPU in one of its own, or replicas on Ray."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from moesaic.errors import UserError
from moesaic.kernels import hardware
from moesaic.model.directory import load
from moesaic.serve.cluster.engine_process import EngineOptions, EngineProcess
from moesaic.serve.cluster.process_loop import ProcessLoop
from moesaic.serve.cluster.replicas import Replicas, frontend_engine
from moesaic.serve.core.engine import Engine
from moesaic.serve.core.engine_loop import EngineLoop
from moesaic.serve.core.memory import SHARE, free_bytes


def launch(
    directory: Path,
    *,
    replicas: int | None,
    adapters: dict[str, str],
    cache_bytes: int | None,
    seed: int | None,
    load_options: dict[str, Any],
    engine_options: dict[str, Any],
) -> tuple[Engine, Any]:
    """The engine, and what makes the loop that drives it."""
    if replicas is not None:
        return _with_replicas(directory, replicas, cache_bytes, seed, load_options, engine_options, adapters)
    if on_gpu(load_options):
        options = engine_options | {"cache_bytes": cache_bytes, "seed": seed}
        return in_own_process(EngineOptions(directory, load_options, options, adapters))
    engine = Engine(load(directory, **load_options), cache_bytes=cache_bytes, seed=seed, **engine_options)
    for name, path in adapters.items():
        engine.load_adapter(name, path)
    return engine, EngineLoop


def on_gpu(load_options: dict[str, Any]) -> bool:
    return torch.cuda.is_available() and str(load_options.get("device") or "cuda").startswith("cuda")


def in_own_process(options: EngineOptions) -> tuple[Engine, Callable[..., ProcessLoop]]:
    """A GPU waits for nobody: the engine's Python must not share an interpreter with that of HTTP."""
    process = EngineProcess.start(options)
    same = {name: options.engine_options.get(name) for name in ("seed", "kv_policy", "cache_dtype")}
    frontend = frontend_engine(
        options.directory,
        pages=process.wait().pages,
        max_requests=options.engine_options["max_requests"],
        **same,
    )
    for name, path in options.adapters.items():
        frontend.load_adapter(name, path)
    return frontend, partial(ProcessLoop, options=options, process=process)


def _with_replicas(
    directory: Path,
    count: int,
    cache_bytes: int | None,
    seed: int | None,
    load_options: dict[str, Any],
    engine_options: dict[str, Any],
    adapters: dict[str, str],
) -> tuple[Engine, Callable[..., Replicas]]:
    """The frontend's engine, and what makes the loop behind it. Replicas on one machine share its cores, and its memory
    for KV caches; on GPUs each has its own."""
    gpu = on_gpu(load_options)
    if cache_bytes is None and not gpu:
        cache_bytes = int(free_bytes(torch.device("cpu")) * SHARE) // count
    if not load_options.get("threads") and not gpu:
        load_options = load_options | {"threads": max(1, hardware.threads() // count)}
    frontend = frontend_engine(
        directory,
        cache_bytes=cache_bytes,
        seed=seed,
        max_requests=engine_options["max_requests"] * count,
        kv_policy=engine_options.get("kv_policy"),
        cache_dtype=engine_options.get("cache_dtype"),
    )
    make_loop = partial(
        Replicas,
        directory=directory,
        count=count,
        load_options=load_options,
        engine_options=engine_options | {"cache_bytes": cache_bytes},
        adapters=adapters,
        resources={"num_gpus": 1} if gpu else None,
    )
    return frontend, make_loop


def parse_adapters(entries: Iterable[str], model: str) -> dict[str, str]:
    """`NAME=DIR` words as directories by name; `model` is the name of the model itself."""
    adapters: dict[str, str] = {}
    for entry in entries:
        name, _, directory = entry.partition("=")
        if not name or not directory:
            raise UserError("--adapter", f'"{entry}" is not NAME=DIR')
        if name in (model, *adapters):
            raise UserError("--adapter", f'"{name}" is the name of another adapter or of the model', "Choose another.")
        adapters[name] = directory
    return adapters
