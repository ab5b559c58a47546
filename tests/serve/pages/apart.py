"""Prefill and decode workers for tests: real processes of a very small model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moesaic.serve.cluster.client import EngineClient
from moesaic.serve.cluster.launch import with_workers
from moesaic.serve.cluster.prefill_decode import Apart, PrefillDecode, roles
from moesaic.serve.cluster.worker import WorkerHandle
from moesaic.serve.core.stats import EngineStats
from tests.serve.cluster.workers import options
from tests.waiting import PATIENCE


def apart_client(
    directory: Path,
    prefill: int = 1,
    decode: int = 1,
    *,
    layouts: tuple[str, str] = ("", ""),
    lease_seconds: float = 1.0,  # after which pages may still be there
    page_seconds: float = PATIENCE,
    transport: str = "distributed",
    adapters: dict[str, str] | None = None,
    **changed: Any,
) -> EngineClient:
    apart = Apart(prefill, decode, *layouts, page_seconds, transport)
    wanted = roles(options(directory, **changed), apart)
    frontend, make = with_workers(wanted, routing=PrefillDecode(lease_seconds), adapters=adapters)
    made: EngineClient = make(frontend)
    return made


def worker_of(loop: EngineClient, role: str) -> WorkerHandle:
    return next(worker for worker in loop.workers if worker.options.role == role)


async def stats_of(loop: EngineClient, role: str) -> EngineStats:
    await loop.read_stats()
    return worker_of(loop, role).stats
