"""From a layout to the groups of ranks that talk to each other: made once, and passed into a run.

Ranks are ordered pp, dp, cp, tp, the last running fastest, so that those that talk most are neighbours. Experts lie
within the dp x cp x tp ranks of a pipeline stage, `ep` of them side by side sharing one set.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from moesaic.kernels import hardware
from moesaic.parallel.layout import ParallelLayout, ranks_per_node
from moesaic.parallel.messages import collect
from moesaic.parallel.staying_up.activity import Activity
from moesaic.parallel.staying_up.meeting import meet

PATIENCE = timedelta(days=1)  # while one rank prepares data or writes, the others wait


@dataclass(frozen=True)
class Place:
    """Where a rank stands in the layout."""

    pp: int = 0
    dp: int = 0
    cp: int = 0
    tp: int = 0
    ep: int = 0


class ParallelMesh:
    """`groups[name]` for dp, cp, tp, pp, ep; `stage` is dp x cp x tp, `copies` those that hold the same experts."""

    def __init__(self, layout: ParallelLayout, device: torch.device) -> None:
        assert dist.get_world_size() == layout.devices
        self.layout, self.device = layout, device
        self.rank, self.ranks = dist.get_rank(), layout.devices
        sizes = (layout.pp, layout.dp, layout.cp, layout.tp)
        kind = device.type
        self.mesh = init_device_mesh(kind, sizes, mesh_dim_names=("pp", "dp", "cp", "tp"))
        stage = prod(sizes[1:])
        self.expert_mesh = init_device_mesh(
            kind, (layout.pp, stage // layout.ep, layout.ep), mesh_dim_names=("stage", "copies", "ep")
        )
        at = self.mesh.get_coordinate()
        assert at is not None
        pp, dp, cp, tp = at
        self.place = Place(pp, dp, cp, tp, self.expert_mesh.get_local_rank("ep"))
        self.activity = Activity()
        self.host = dist.new_group(backend="gloo", timeout=PATIENCE, group_desc="host")
        self.writers = dist.new_group(backend="gloo", timeout=PATIENCE, group_desc="writers")  # of a thread of its own

    def group(self, name: str) -> dist.ProcessGroup:
        if name in ("ep", "copies"):
            return self.expert_mesh.get_group(name)
        if name == "stage":
            return self.stage.get_group()
        return self.mesh.get_group(name)

    @cached_property
    def stage(self) -> DeviceMesh:
        return self.mesh["dp", "cp", "tp"]._flatten("stage")

    @cached_property
    def data(self) -> DeviceMesh:
        return self.mesh["dp", "cp"]._flatten("data")

    def sharers(self, kind: str) -> DeviceMesh:
        """The ranks that hold the same part of a parameter of this kind, among which FSDP divides it."""
        if kind == "expert":
            return self.expert_mesh["copies"]
        return self.data if kind == "tensor" else self.stage

    def replicated(self, kind: str, replicas: int) -> DeviceMesh:
        """The same ranks as `replicas` groups that each divide the parameter among them (HSDP)."""
        layout = self.layout
        stage = layout.dp * layout.cp * layout.tp
        apart = {"dense": 1, "tensor": layout.tp, "expert": layout.ep}[kind]  # ranks that hold other parts
        sizes = (layout.pp, replicas, stage // apart // replicas, apart)
        return init_device_mesh(self.device.type, sizes, mesh_dim_names=("pp", "copy", "shard", "part"))[
            "copy", "shard"
        ]

    def nodes(self, size: int = 0) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        """Of the ranks that share this one's experts: those with its place on each node, and those of its node."""
        size, layout = size or ranks_per_node(), self.layout
        copies = layout.dp * layout.cp * layout.tp // layout.ep
        mesh = init_device_mesh(
            self.device.type,
            (layout.pp, copies, layout.ep // size, size),
            mesh_dim_names=("stage", "copies", "node", "local"),
        )
        return mesh.get_group("node"), mesh.get_group("local")

    @property
    def is_main(self) -> bool:
        """Whether this rank writes what is written once."""
        return self.rank == 0

    def barrier(self) -> None:
        with self.activity.doing("waiting for all", patient=True):
            dist.barrier(group=self.host)

    def collect(self, value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
        """What every rank says, in their order."""
        return collect(value, group or self.host)


def join(timeout: float) -> torch.device:
    """Meet the other processes; the device this one computes on."""
    device = hardware.device()
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        limit = timedelta(seconds=timeout)
        if os.environ.get("TORCHELASTIC_RUN_ID") is None:
            dist.init_process_group(backend, timeout=limit)
        else:
            store, rank, ranks = next(dist.rendezvous("env://", timeout=limit))
            store = meet(dist.PrefixStore("moesaic", store), rank, ranks, timeout)
            dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=limit)
    return device
