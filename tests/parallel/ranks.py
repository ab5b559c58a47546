"""Runs a function on several real processes (gloo), which end together or with the first error.

They are forked from a server that has imported what they need and computed nothing yet (tests/forked.py): importing
takes each of them longer than most of what it does.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes

from tests.figures import leave_blank


def on_ranks(world: int, check: Callable[..., None], folder: Path, *args: Any) -> None:
    """`check(rank, world, *args)` on every rank."""
    start(_rank, (world, check, str(folder / "store"), args), world)


def in_turn(rank: int, world: int, *checks: Callable[..., None]) -> None:
    """Several checks in the same processes."""
    for check in checks:
        check(rank, world)


def start(function: Callable[..., None], args: tuple[Any, ...], world: int, join: bool = True) -> Any:
    """`function(rank, *args)` in so many processes."""
    return processes.start_processes(function, args, world, join, start_method="forkserver")


def _rank(rank: int, world: int, check: Callable[..., None], store: str, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    leave_blank()
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    try:
        check(rank, world, *args)
        dist.barrier()
    finally:
        dist.destroy_process_group()
