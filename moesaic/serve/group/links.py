"""Ranks that talk to each other: collectives that only move data, each counted by its kind.

Nothing here is ever summed: what arrives has the bits it was sent with, so a group computes what one process would.
A rank that does not answer in time, or whose connection breaks, makes every collective of its group fail (`RankLost`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions

from moesaic.serve.core.driver import EngineLost

MEETING = timedelta(minutes=3)  # for ranks to find each other: some import longer than others


class RankLost(EngineLost):
    """Another rank of the group has died or does not answer. A group that lost a rank cannot go on."""


@dataclass
class Traffic:
    """What left this rank, by kind: how many messages, and how many bytes to other ranks."""

    messages: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    bytes: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def count(self, kind: str, size: int) -> None:
        self.messages[kind] += 1
        self.bytes[kind] += size

    def clear(self) -> None:
        self.messages.clear()
        self.bytes.clear()


class Link:
    """Some ranks of a group, in the order of `members`. Every member calls the same methods in the same order."""

    def __init__(
        self,
        store: dist.Store,
        name: str,
        members: Sequence[int],
        rank: int,
        *,
        patience: float,
        traffic: Traffic,
        device: torch.device,
        nccl: bool = False,
    ) -> None:
        self.members, self.index, self.size = tuple(members), tuple(members).index(rank), len(members)
        self.patience, self.traffic, self.device, self.nccl = patience, traffic, device, nccl
        self._group: Any = None
        if self.size > 1:
            named, limit = dist.PrefixStore(f"{name}/{members[0]}", store), timedelta(seconds=patience)
            meeting = max(limit, MEETING)
            with self._lost():
                if nccl:
                    options = dist.ProcessGroupNCCL.Options()
                    options._timeout = limit
                    self._group = dist.ProcessGroupNCCL(named, self.index, self.size, options)
                else:
                    self._group = dist.ProcessGroupGloo(named, self.index, self.size, meeting)
                    self._group._set_default_timeout(limit)

    @contextmanager
    def _lost(self, patience: float | None = None) -> Any:
        try:
            yield
        except RuntimeError as error:
            if "not enough memory" in str(error):  # of this very rank
                raise
            others = ", ".join(str(rank) for at, rank in enumerate(self.members) if at != self.index)
            problem = f"one of the ranks {others} is gone, or was silent for {patience or self.patience:g} s"
            raise RankLost(f"{problem} ({str(error).strip().splitlines()[0][:200]})") from error

    def gather(self, own: Tensor, kind: str, patience: float | None = None) -> Tensor:
        """Every member's tensor of the same shape: (members, ...)."""
        if self.size == 1:
            return own.unsqueeze(0)
        sent = self._out(own)
        found = sent.new_empty(self.size * sent.numel())
        self.traffic.count(kind, sent.nbytes * (self.size - 1))
        options = AllgatherOptions()
        options.timeout = timedelta(seconds=patience or self.patience)
        with self._lost(patience):
            self._group._allgather_base(found, sent.flatten(), options).wait()
        return self._back(found, own.dtype).view(self.size, *own.shape)

    def columns(self, own_TI: Tensor, widths: Sequence[int], kind: str) -> Tensor:
        """Every member's columns side by side: (T, sum of widths). Uneven ones travel padded to the widest."""
        if self.size == 1 or not len(own_TI):
            return own_TI if self.size == 1 else own_TI.new_empty(0, sum(widths))
        widest = max(widths)
        if own_TI.shape[1] < widest:
            own_TI = torch.nn.functional.pad(own_TI, (0, widest - own_TI.shape[1]))
        found_RTI = self.gather(own_TI, kind)
        if min(widths) == widest:
            return found_RTI.transpose(0, 1).reshape(len(own_TI), -1)
        return torch.cat([part[:, :width] for part, width in zip(found_RTI, widths, strict=True)], 1)

    def rows(self, own_ND: Tensor, counts: Sequence[int], kind: str) -> Tensor:
        """Every member's rows, one member after the other, as many as `counts` says."""
        if self.size == 1 or not sum(counts):
            return own_ND
        if min(counts) == max(counts):
            return self.gather(own_ND, kind).flatten(0, 1)
        leaving = [len(own_ND)] * self.size
        return self.exchange(own_ND.repeat(self.size, *[1] * (own_ND.dim() - 1)), leaving, list(counts), kind)

    def exchange(self, rows: Tensor, leaving: list[int], arriving: list[int], kind: str) -> Tensor:
        """To every member as many rows as `leaving` says, from each as many as `arriving`. A member with nothing to
        send and nothing to get takes part: nobody has to know."""
        if self.size == 1:
            return rows
        sent = self._out(rows.flatten(1))
        found = sent.new_empty(sum(arriving), sent.shape[1])
        self.traffic.count(kind, sent.shape[1] * (sum(leaving) - leaving[self.index]))
        with self._lost():
            self._group.alltoall_base(found, sent, arriving, leaving).wait()
        return self._back(found, rows.dtype).view(-1, *rows.shape[1:])

    def broadcast(self, values: Tensor, kind: str, patience: float | None = None) -> Tensor:
        """The first member's tensor, which others give room for."""
        if self.size == 1:
            return values
        sent = self._out(values)
        if self.index == 0:
            self.traffic.count(kind, sent.nbytes * (self.size - 1))
        options = dist.BroadcastOptions()
        options.timeout = timedelta(seconds=patience or self.patience)
        with self._lost(patience):
            self._group.broadcast([sent], options).wait()
        return self._back(sent, values.dtype).view_as(values)

    def to_first(self, own: Tensor, shapes: Sequence[Sequence[int]], kind: str) -> list[Tensor]:
        """At the first member every member's tensor, of these shapes; nothing elsewhere. What is empty is not sent."""
        if self.index:
            if own.numel():
                sent = self._out(own)
                self.traffic.count(kind, sent.nbytes)
                with self._lost():
                    self._group.send([sent], 0, 0).wait()
            return []
        found = [own]
        for member, shape in enumerate(shapes[1:], 1):
            there = torch.empty(tuple(shape), dtype=own.dtype, device=own.device)
            if there.numel():
                room = torch.empty_like(self._out(there))
                with self._lost():
                    self._group.recv([room], member, 0).wait()
                there = self._back(room, own.dtype).view(tuple(shape))
            found.append(there)
        return found

    def _out(self, tensor: Tensor) -> Tensor:
        """As bytes, where the collective takes them from: any dtype travels, and its bits stay."""
        tensor = tensor.contiguous()
        if tensor.dim() == 0 or not tensor.numel():
            tensor = tensor.reshape(tensor.shape if tensor.dim() else (1,))
        if not self.nccl:
            tensor = tensor.cpu()
        return tensor.view(torch.uint8)

    def _back(self, found: Tensor, dtype: torch.dtype) -> Tensor:
        return found.view(dtype).to(self.device)
