"""Runs a function on several real processes (gloo), which end together or with the first error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes


def on_ranks(world: int, check: Callable[..., None], folder: Path, *args: Any) -> None:
    """`check(rank, world, *args)` on every rank."""
    processes.spawn(_rank, args=(world, check, str(folder / "store"), args), nprocs=world)


def _rank(rank: int, world: int, check: Callable[..., None], store: str, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    try:
        check(rank, world, *args)
        dist.barrier()
    finally:
        dist.destroy_process_group()
