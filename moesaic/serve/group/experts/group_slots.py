"""Experts of a worker group in slots: more than one rank may hold an expert, and what a slot holds can change between
two steps.

Ranks of an expert-parallel group send each other the weights of the experts that move, and nothing else; what is
quantized is read from the model directory instead. A row's result has the same bits whichever copy computed it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from moesaic.errors import UserError
from moesaic.model.transformer import Model
from moesaic.parallel.experts.placement import Move, SlotPlan, after
from moesaic.serve.group.experts.choice import Holders
from moesaic.serve.group.experts.slots import ExpertReader
from moesaic.serve.group.kernels import GroupKernels
from moesaic.serve.group.placement import Placement
from moesaic.serve.group.worker_group import WorkerGroup


class CopiedPlacement(Placement):
    """Where a row's expert is computed: at each of its copies in turn. All ranks that know a row choose alike, by its
    place among those that want the expert and the number of the step."""

    def __init__(self, plan: SlotPlan, experts: int, kernels: GroupKernels) -> None:
        self.holders, self.kernels = Holders(plan, experts), kernels
        self.slot_RE = torch.full((plan.ranks, experts), -1)
        for rank, own in enumerate(plan.slots):
            for slot in range(len(own) - 1, -1, -1):  # of two copies on a rank the first
                self.slot_RE[rank, own[slot]] = slot

    def of(self, experts_A: Tensor) -> tuple[Tensor, Tensor]:
        rank_A = self.holders.choose(experts_A.cpu(), self.kernels.steps)
        place_A = self.slot_RE[rank_A, experts_A.cpu()]
        return rank_A.to(experts_A.device), place_A.to(experts_A.device)


class GroupSlots:
    """`plans` say what every slot of the `ep` ranks holds, by layer; each rank has `copies` slots beyond its share."""

    def __init__(self, model: Model, group: WorkerGroup, directory: str | Path, copies: int) -> None:
        if group.layout.ep < 2:
            raise UserError("--expert-replicas", "needs experts on several ranks", 'Say --layout "ep=2", or more.')
        self.model, self.group, self.kernels = model, group, cast(GroupKernels, model.ops)
        self.reader = ExpertReader(directory, model.dtype, model.device)
        self.plans: dict[int, SlotPlan] = {}
        self.moved_bytes = 0  # that this rank sent
        for layer in self.reader.layers:
            count, here = self.reader.shape(layer).count, len(self._ffn(layer).gate_up_EGD)
            plan = SlotPlan.even(count, group.layout.ep, min(count, here + copies))
            for expert in plan.slots[self._rank][here:]:
                self._append(layer, expert)
            self._follow(layer, plan)

    @property
    def _rank(self) -> int:
        return self.group.experts.index

    def _ffn(self, layer: int) -> Any:
        """Whose matrices are tensors of all slots, or lists of quantized ones."""
        return self.model.layers[layer].ffn

    def _follow(self, layer: int, plan: SlotPlan) -> None:
        self.plans[layer] = plan
        experts = self.reader.shape(layer).count
        self.kernels.placements[f"layers.{layer}.ffn"] = CopiedPlacement(plan, experts, self.kernels)

    def move(self, changes: dict[int, Sequence[Move]]) -> None:
        """All ranks together, between two steps."""
        with torch.no_grad():
            for layer, moves in changes.items():
                self._move(layer, moves)
                self._follow(layer, after(self.plans[layer], moves))

    def reload(self, directory: str | Path) -> None:
        """The same experts of other weights."""
        self.reader = ExpertReader(directory, self.model.dtype, self.model.device)
        for layer, plan in self.plans.items():
            for slot, expert in enumerate(plan.slots[self._rank]):
                self._read(layer, slot, expert)

    def _move(self, layer: int, moves: Sequence[Move]) -> None:
        ffn, link, rank = self._ffn(layer), self.group.experts, self._rank
        if isinstance(ffn.gate_up_EGD, nn.ModuleList):
            for move in moves:
                if move.rank == rank:
                    self._read(layer, move.slot, move.expert)
            return
        held = self.plans[layer].slots[rank]
        leaving = [[move for move in moves if move.source == rank and move.rank == to] for to in range(link.size)]
        arriving = [[move for move in moves if move.rank == rank and move.source == of] for of in range(link.size)]
        rows = [self._bytes(ffn, held.index(move.expert)) for some in leaving for move in some]
        room = self._bytes(ffn, 0)
        sent_NB = torch.stack(rows) if rows else room.new_empty(0, len(room))
        self.moved_bytes += sum(len(some) for to, some in enumerate(leaving) if to != rank) * len(room)
        came_NB = link.exchange(sent_NB, [len(some) for some in leaving], [len(some) for some in arriving], "experts")
        for row_B, move in zip(came_NB, (move for some in arriving for move in some), strict=True):
            self._write(ffn, move.slot, row_B)

    @staticmethod
    def _bytes(ffn: Any, slot: int) -> Tensor:
        parts = (ffn.gate_up_EGD[slot], ffn.down_EDF[slot])
        return torch.cat([part.detach().contiguous().flatten().view(torch.uint8) for part in parts])

    @staticmethod
    def _write(ffn: Any, slot: int, row_B: Tensor) -> None:
        start = 0
        for part in (ffn.gate_up_EGD[slot], ffn.down_EDF[slot]):
            size = part.numel() * part.element_size()
            part.copy_(row_B[start : start + size].clone().view(part.dtype).view(part.shape))
            start += size

    def _read(self, layer: int, slot: int, expert: int) -> None:
        ffn, read = self._ffn(layer), self.reader.read(layer, expert)
        for matrices, new in ((ffn.gate_up_EGD, read.gate_up_GD), (ffn.down_EDF, read.down_DF)):
            if isinstance(matrices, nn.ModuleList):
                matrices[slot] = new
            else:
                matrices.data[slot].copy_(new)

    def _append(self, layer: int, expert: int) -> None:
        ffn, read = self._ffn(layer), self.reader.read(layer, expert)
        for name, new in (("gate_up_EGD", read.gate_up_GD), ("down_EDF", read.down_DF)):
            matrices: Any = getattr(ffn, name)
            if isinstance(matrices, nn.ModuleList):
                matrices.append(new)
            else:
                grown = torch.cat([matrices.data, new.unsqueeze(0)])
                setattr(ffn, name, nn.Parameter(grown, requires_grad=False))
