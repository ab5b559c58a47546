"""What a rank of a worker group holds, and what it does when rank 0 says so."""

from __future__ import annotations

import resource
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import cast

import torch

from moesaic.errors import UserError
from moesaic.model.formats.matching import match
from moesaic.model.formats.opening import open_checkpoint
from moesaic.model.layout import PagedCache
from moesaic.model.transformer import Model
from moesaic.serve.group.experts.group_slots import GroupSlots
from moesaic.serve.group.experts.rebalancing import Changes
from moesaic.serve.group.kernels import GroupKernels
from moesaic.serve.group.loading import load_share
from moesaic.serve.group.rank_step import RankStep
from moesaic.serve.group.shares import EXPERTS
from moesaic.serve.group.worker_group import WorkerGroup


@dataclass(frozen=True)
class RankStats:
    """In bytes; `peak` is the most memory its process ever had."""

    rank: int
    weights: int
    cache: int
    peak: int
    sent: int
    messages: int


class RankState:
    def __init__(self, model: Model, group: WorkerGroup, cache: PagedCache, slots: GroupSlots | None = None) -> None:
        self.model, self.group, self.cache, self.slots = model, group, cache, slots
        self.kernels = cast(GroupKernels, model.ops)
        self.step = RankStep(model, group, cache)

    def stats(self) -> list[RankStats]:
        """Of all ranks, on every rank; all call it together."""
        traffic = self.group.traffic
        own = RankStats(
            self.group.rank,
            sum(tensor.nbytes for tensor in (*self.model.parameters(), *self.model.buffers())),
            sum(tensor.nbytes for layer in self.cache.layers for tensor in layer.values()),
            peak_bytes(self.model.device),
            sum(count for kind, count in traffic.bytes.items() if kind != "stats"),
            sum(count for kind, count in traffic.messages.items() if kind != "stats"),
        )
        numbers = torch.tensor(list(asdict(own).values()))
        found = self.group.control.gather(numbers, "stats", self.group.stall_seconds)
        return [RankStats(*numbers) for numbers in found.tolist()]

    def meet(self) -> None:
        """All ranks, after what takes one longer than another: reading files."""
        self.group.control.gather(torch.zeros(1), "stats")

    def move_experts(self, changes: Changes) -> None:
        """All ranks together."""
        assert self.slots is not None
        self.slots.move(changes)

    def check_weights(self, directory: str | Path) -> None:
        """Whether a directory has weights of this very model."""
        config, _ = match(open_checkpoint(directory))
        ours = replace(self.model.config, init_std=0.0, dtype="float32")
        if replace(config, init_std=0.0, dtype="float32") != ours:
            raise UserError(directory, "is another model than the one that is served", "Name one of the same shape.")

    def load_weights(self, directory: str) -> None:
        """Other numbers in the same places."""
        fresh = load_share(self.group, directory, {"dtype": self.model.dtype, "device": self.model.device})
        with torch.no_grad():
            for (name, here), there in zip(self.model.state_dict().items(), fresh.state_dict().values(), strict=True):
                if self.slots is None or name.rpartition(".")[2] not in EXPERTS:
                    here.copy_(there)
            if self.slots is not None:
                self.slots.reload(directory)


def peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")  # the system's own count goes on from the process that started this one
    lines = status.read_text().splitlines() if status.exists() else []
    own = [int(line.split()[1]) for line in lines if line.startswith("VmHWM:")]
    return (own[0] if own else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * 1024
