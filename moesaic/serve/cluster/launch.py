"""Load the model that is served: one engine in this process, or workers, processes here or actors on Ray.

    engine, make_loop = launch(EngineOptions(directory, load_options, engine_options), replicas=2)

A single engine on a CPU runs in this process. Every other server has a front without weights and an `EngineClient`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from moesaic.errors import UserError
from moesaic.kernels import hardware
from moesaic.serve.cluster.client import EngineClient, Started
from moesaic.serve.cluster.frequency_routing import FrequencyRouting
from moesaic.serve.cluster.frontend import frontend_engine
from moesaic.serve.cluster.kinds import engine_kind
from moesaic.serve.cluster.messages import EngineOptions
from moesaic.serve.cluster.on_this_machine import OnThisMachine, on_gpu
from moesaic.serve.cluster.placed import OnPlaces, Placement
from moesaic.serve.cluster.prefill_decode import Apart, PrefillDecode, roles
from moesaic.serve.cluster.ray_worker import OnRay
from moesaic.serve.cluster.routing import Routing
from moesaic.serve.cluster.worker import StartWorker
from moesaic.serve.core.encoder_engine import engine_for
from moesaic.serve.core.engine import Engine
from moesaic.serve.core.engine_loop import EngineLoop
from moesaic.serve.core.memory import SHARE, free_bytes
from moesaic.serve.offload.loading import load_served
from moesaic.serve.pages.identity import with_identity

MakeLoop = Callable[..., Any]


def launch(
    options: EngineOptions,
    *,
    replicas: int | None = None,
    adapters: dict[str, str] | None = None,
    ray: str | None = None,
    apart: Apart | None = None,
    placement: Placement | None = None,
) -> tuple[Engine, MakeLoop]:
    """The engine that checks requests, and what makes the loop that drives it or its workers. They are processes here,
    unless `ray` is the address of a cluster, or `placement` says where processes for them were started; `apart` are
    workers for prefill and for decode."""
    gpu = on_gpu(options.load_options)
    if apart is not None:
        if replicas is not None:
            raise UserError("--replicas", "cannot be combined with --prefill and --decode", "Leave it out.")
        wanted = roles(options, apart, "127.0.0.1" if ray is None and placement is None else "auto")
        parts = _parts(wanted, placement)
        wanted = wanted if gpu else [fair_share(one, parts) for one in wanted]
        start = _workplace(ray, placement, gpu)
        return with_workers(wanted, adapters=adapters, start_worker=start, routing=PrefillDecode())
    if replicas is None and ray is None and placement is None and not options.layout and not gpu:
        running = with_identity(options.directory, options.engine_options)
        engine = engine_for(load_served(options.directory, **options.load_options), **running)
        for name, path in (adapters or {}).items():
            engine.load_adapter(name, path)
        return engine, EngineLoop
    count = 1 if replicas is None else replicas
    if count < 1:
        raise UserError("--replicas", f"must be at least 1, not {count}")
    shared = options if gpu else fair_share(options, _parts([options] * count, placement))
    governed = options.engine_options.get("frequency") is not None
    if governed and options.layout:
        raise UserError("--frequency", "sets the clock of one GPU, and a group has more", "Leave out --layout.")
    routing = FrequencyRouting() if governed else None
    start = _workplace(ray, placement, gpu)
    return with_workers([shared] * count, adapters=adapters, start_worker=start, routing=routing)


def _parts(wanted: Sequence[EngineOptions], placement: Placement | None) -> int:
    """How many processes share this machine. On Ray nobody knows yet: all, at worst."""
    ranks = sum(engine_kind(one).ranks for one in wanted)
    return ranks if placement is None else min(ranks, placement.neighbours)


def _workplace(ray: str | None, placement: Placement | None, gpu: bool) -> StartWorker:
    if ray is not None and placement is not None:
        raise UserError("--placed-by", "cannot be combined with --ray", "Leave one of them out.")
    if placement is not None:
        return OnPlaces(placement)
    return OnRay(None if ray == "local" else ray, gpu=gpu) if ray is not None else OnThisMachine()


def with_workers(
    wanted: Sequence[EngineOptions],
    *,
    adapters: dict[str, str] | None = None,
    start_worker: StartWorker | None = None,
    routing: Routing | None = None,
) -> tuple[Engine, MakeLoop]:
    """Start a worker for each of these options, all together; the front's engine, and what makes its `EngineClient`."""
    start = start_worker or OnThisMachine()
    workers = [start(options) for options in wanted]
    try:
        started = [Started(options, one, one.wait()) for options, one in zip(wanted, workers, strict=True)]
        first = wanted[0].engine_options
        same = {name: first.get(name) for name in ("seed", "kv_policy", "cache_dtype", "max_requests") if name in first}
        # A prompt must fit any worker, because it may go on there.
        frontend = frontend_engine(wanted[0].directory, pages=min(one.ready.pages for one in started), **same)
        make_loop = partial(EngineClient, start_worker=start, started=started, routing=routing, adapters=adapters)
    except BaseException:
        for worker in workers:
            worker.kill()
        raise
    return frontend, make_loop


def fair_share(options: EngineOptions, parts: int) -> EngineOptions:
    """Processes on one machine share its cores, and its memory for KV caches; on GPUs each has its own."""
    loading, running = dict(options.load_options), dict(options.engine_options)
    if running.get("cache_bytes") is None:
        running["cache_bytes"] = int(free_bytes(torch.device("cpu")) * SHARE) // parts
    if not loading.get("threads"):
        loading["threads"] = max(1, hardware.threads() // parts)
    return replace(options, load_options=loading, engine_options=running)


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


def parse_models(entries: Iterable[str], taken: Iterable[str]) -> dict[str, Path]:
    """`NAME=DIR` words of further models as directories by name."""
    models: dict[str, Path] = {}
    names = set(taken)
    for entry in entries:
        name, _, directory = entry.partition("=")
        if not name or not directory:
            raise UserError("--also", f'"{entry}" is not NAME=DIR')
        if name in names:
            raise UserError("--also", f'"{name}" is the name of another model or adapter', "Choose another.")
        if not Path(directory).exists():
            raise UserError("--also", f'there is no "{directory}"', "Give a model directory.")
        names.add(name)
        models[name] = Path(directory)
    return models


def shared_by(options: EngineOptions, models: int) -> EngineOptions:
    """Of several models on one machine each has its part of the cores, and of the memory for KV caches."""
    return options if on_gpu(options.load_options) else fair_share(options, models)


def further_options(first: EngineOptions, directory: Path) -> EngineOptions:
    """A further model runs as the first does, but for what is made for one model, or placed for it."""
    running = {
        name: value
        for name, value in first.engine_options.items()
        if name not in ("drafter", "kv_policy", "frequency", "expert_replicas", "rebalance_steps", "rebalancing")
    }
    return EngineOptions(directory, first.load_options, running, stall_seconds=first.stall_seconds)
