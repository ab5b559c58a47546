"""What travels: every collective of a rank with its group, bytes and seconds, as events of its trace.

VCCL watches flows inside the library that moves them, and moves them to a spare path when a link fails. From outside a
backend two things can be had: how long each collective took on each rank, which is here, and a way on after a failure,
which is a restart (gloo and NCCL give up a whole group when one connection breaks). What a card or a driver does on its
own, such as NCCL's retries on InfiniBand, stays with it.

A collective is waited for where it is begun, so that its time is its own: a traced run overlaps nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode

NAMES = {
    "allreduce_": "all_reduce",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "all_to_all_single": "all_to_all",
    "broadcast_": "broadcast",
    "broadcast": "broadcast",
    "barrier": "barrier",
}
LIBRARIES = ("c10d", "_c10d_functional")


class Flows(TorchDispatchMode):
    """`note(collective, group, bytes, start, end)` is called for each of them."""

    def __init__(self, now: Callable[[], float], note: Callable[[str, str, int, float, float], None]) -> None:
        super().__init__()
        self.now, self.note = now, note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace not in LIBRARIES or (name := NAMES.get(func._opname)) is None:
            return func(*args, **(kwargs or {}))
        start = self.now()
        found = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            work = found[-1] if isinstance(found, tuple | list) else found
            work.wait()
        else:
            torch.ops._c10d_functional.wait_tensor(found)
        self.note(name, group_name(_group(args)), _bytes(args), start, self.now())
        return found


def group_name(group: dist.ProcessGroup) -> str:
    """`ep (0, 1)`; the group of all ranks, which stands for any that is as large, is `all`."""
    ranks = dist.get_process_group_ranks(group)
    name = group.group_desc.removeprefix("mesh_").removeprefix("default_pg") or "all"
    return f"{name} ({', '.join(map(str, ranks)) if len(ranks) <= 8 else f'{ranks[0]} to {ranks[-1]}'})"


def _group(args: Any) -> dist.ProcessGroup:
    for given in args:
        if isinstance(given, torch.ScriptObject) and "ProcessGroup" in str(given._type()):
            return dist.ProcessGroup.unbox(given)
    name: Any = next(given for given in reversed(args) if isinstance(given, str))
    return _resolve_process_group(name)


def _bytes(args: Any) -> int:
    """Of what a rank puts in: the last of the tensors it was called with, after those that take the result."""
    given = [tensors for arg in args if (tensors := _tensors(arg))]
    return sum(tensor.numel() * tensor.element_size() for tensor in given[-1]) if given else 0


def _tensors(arg: Any) -> list[Tensor]:
    if isinstance(arg, Tensor):
        return [arg]
    return [tensor for one in arg for tensor in _tensors(one)] if isinstance(arg, list | tuple) else []
