"""Load the model that is served: one engine in this process, or replicas on Ray behind one front."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from moesaic.errors import UserError
from moesaic.model.directory import load
from moesaic.serve.cluster.replicas import with_replicas
from moesaic.serve.core.engine import Engine
from moesaic.serve.core.engine_loop import EngineLoop


def launch(
    directory: Path,
    *,
    replicas: int | None,
    adapters: dict[str, str],
    cache_bytes: int | None,
    seed: int | None,
    weights: dict[str, Any],
    options: dict[str, Any],
) -> tuple[Engine, Any]:
    """The engine, and what makes the loop that drives it. `weights` is for loading them, `options` for the engine."""
    if replicas is not None:
        return with_replicas(directory, replicas, cache_bytes, seed, weights, options, adapters)
    engine = Engine(load(directory, **weights), cache_bytes=cache_bytes, seed=seed, **options)
    for name, path in adapters.items():
        engine.load_adapter(name, path)
    return engine, EngineLoop


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
