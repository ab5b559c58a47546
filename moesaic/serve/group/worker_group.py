"""Where a rank stands in a worker group, and its links to the others."""

from __future__ import annotations

import re
import socket
import zlib
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist

from moesaic.errors import UserError
from moesaic.parallel.layout import ParallelLayout, parse_layout
from moesaic.serve.group.links import MEETING, Link, Traffic

STALL_SECONDS = 20.0  # that a rank may be silent in a forward
PATIENCE = 86400.0  # between two steps: an idle engine is no error


def serving_layout(text: str, place: str = "--layout") -> ParallelLayout:
    """`tp=2 ep=4`: where experts have more ranks than tensors do, the rest is data parallel inside the group."""
    given = {key.lower(): int(value) for key, value in re.findall(r"(\w+)\s*=\s*(\d+)", text)}
    tp, ep = given.get("tp", 1), given.get("ep", 1)
    if "dp" not in given and ep > tp > 0 and ep % tp == 0 and not text.endswith(".json"):
        text = f"{text} dp={ep // tp}"
    layout = parse_layout(text, place=place)
    for key, instead in (("pp", "Divide layers by tp and ep."), ("cp", "Long prompts are prefilled in chunks.")):
        if getattr(layout, key) > 1:
            raise UserError(
                f"{place}: {key}={getattr(layout, key)}", "is for training, an engine has no such ranks", instead
            )
    return replace(layout, zero=1, interleave=1, mb=0)


class WorkerGroup:
    """Where this rank stands, and its links to the others. `traffic` counts what it sent."""

    def __init__(
        self, layout: ParallelLayout, rank: int, store: dist.Store, stall_seconds: float, device: torch.device
    ) -> None:
        self.layout, self.rank, self.ranks, self.device = layout, rank, layout.devices, device
        self.stall_seconds = stall_seconds
        self.experts_away = False  # whether routed experts are on ranks that are not of this group
        self.dp, self.tp = divmod(rank, layout.tp)
        self.traffic = Traffic()
        tensor = range(self.dp * layout.tp, (self.dp + 1) * layout.tp)
        first = rank // layout.ep * layout.ep
        self.control = self._link(store, "control", range(self.ranks), PATIENCE, False)
        host = torch.tensor([zlib.crc32(socket.gethostname().encode())])
        self.neighbours = int((self.control.gather(host, "start").flatten() == host).sum())  # ranks on this machine
        enough = device.type == "cuda" and torch.cuda.device_count() >= self.neighbours  # NCCL wants one GPU for each
        nccl = bool(self.control.gather(torch.tensor([enough]), "start").all())
        self.world = self._link(store, "world", range(self.ranks), stall_seconds, nccl)
        self.tensor = self._link(store, "tensor", tensor, stall_seconds, nccl)
        self.experts = self._link(store, "experts", range(first, first + layout.ep), stall_seconds, nccl)
        self.traffic.clear()

    def _link(self, store: dist.Store, name: str, members: range, patience: float, nccl: bool) -> Link:
        device = torch.device("cpu") if name == "control" else self.device
        return Link(store, name, members, self.rank, patience=patience, traffic=self.traffic, device=device, nccl=nccl)

    @property
    def is_main(self) -> bool:
        """Whether this is the rank that schedules."""
        return self.rank == 0


def join(
    layout: ParallelLayout,
    rank: int,
    address: str,
    stall_seconds: float = STALL_SECONDS,
    device: torch.device | str = "cpu",
) -> WorkerGroup:
    """Meet the other ranks at `host:port`, which rank 0 opens, or at `file:PATH`, a new file that all can reach."""
    store = meeting_store(address, rank, layout.devices, stall_seconds)
    return WorkerGroup(layout, rank, store, stall_seconds, torch.device(device))


def meeting_store(address: str, rank: int, ranks: int, stall_seconds: float) -> dist.Store:
    host, _, port = address.rpartition(":")
    if host == "file":
        return dist.FileStore(port, ranks)
    limit = max(MEETING, timedelta(seconds=stall_seconds))
    return dist.TCPStore(host, int(port), None, rank == 0, limit, wait_for_workers=False)
