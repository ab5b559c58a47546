"""A rank's experts, in slots of which each holds one: read from the model directory one at a time, and replaced so.

reader = ExpertReader(directory, dtype, device)
held = LayerExperts(reader, layer=3, experts=[0, 1, 6])
held.weights                        for kernels: slots in place of experts
held.slots_of(experts_A)            where each of these is; one that is not held is read first
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from moesaic import kernels
from moesaic.kernels import Kernels, Mode, hardware
from moesaic.kernels.layer_weights import ExpertWeights
from moesaic.kernels.quantized import QuantizedKernels, QuantizedWeight
from moesaic.model.config import Experts
from moesaic.model.families import Place
from moesaic.model.formats.matching import match
from moesaic.model.formats.opening import open_checkpoint
from moesaic.parallel.boxes import stored_boxes


class Expert(NamedTuple):
    """Its two matrices, tensors or quantized."""

    gate_up_GD: Any
    down_DF: Any


class ExpertReader:
    """Single experts of a model directory; nothing else of it is read."""

    def __init__(self, directory: str | Path, dtype: torch.dtype | str | None, device: torch.device) -> None:
        self.source = open_checkpoint(directory)
        self.config, places = match(self.source)
        wanted = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        self.dtype: torch.dtype = wanted or hardware.dtype(device, getattr(torch, self.config.dtype))
        self.device = device
        self.read_experts = 0
        self._read = stored_boxes(self.source)
        self._places: dict[str, list[Place]] = defaultdict(list)
        for place in places:
            if not place.copy:
                self._places[place.parameter].append(place)

    def shape(self, layer: int) -> Experts:
        ffn = self.config.layers[layer].ffn
        assert isinstance(ffn, Experts)
        return ffn

    @property
    def layers(self) -> list[int]:
        """Those that have experts."""
        return [number for number, layer in enumerate(self.config.layers) if isinstance(layer.ffn, Experts)]

    def kernels(self, mode: Mode = "fast") -> Kernels:
        """What experts are computed with, the same as in a model."""
        plain = kernels.choose(self.device, mode)
        return cast(Kernels, QuantizedKernels(plain)) if hasattr(self.source, "quantized") else plain

    def read(self, layer: int, expert: int) -> Expert:
        self.read_experts += 1
        width, hidden, name = self.shape(layer).hidden, self.config.hidden, f"layers.{layer}.ffn"
        gate_up_GD = self._matrix(f"{name}.gate_up_EGD", expert, (2 * width, hidden))
        return Expert(gate_up_GD, self._matrix(f"{name}.down_EDF", expert, (hidden, width)))

    def _matrix(self, parameter: str, expert: int, shape: tuple[int, int]) -> Any:
        quantized = getattr(self.source, "quantized", None)
        if quantized is not None:
            found = quantized(parameter, self._places[parameter], self.device, experts=[expert])
            if found is not None:
                found[0].dtype = self.dtype
                return found[0]
        box = (slice(expert, expert + 1), *(slice(0, size) for size in shape))
        return self._read(parameter, box)[0].to(self.device, self.dtype)


class LayerExperts:
    """`held[slot]` is the expert in each slot."""

    def __init__(self, reader: ExpertReader, layer: int, experts: Sequence[int]) -> None:
        self.reader, self.layer, self.held = reader, layer, list[int]()
        self.activation = reader.config.activation
        self._slot_E = torch.full((reader.shape(layer).count,), -1)
        self._gate_up: Any = None
        self._down: Any = None
        self.add(experts)

    @property
    def weights(self) -> ExpertWeights:
        return ExpertWeights(self._gate_up, self._down, self.activation, f"layers.{self.layer}.ffn")

    @property
    def bytes(self) -> int:
        return sum(_bytes(part) for part in (self._gate_up, self._down) if part is not None)

    def slots_of(self, experts_A: Tensor) -> Tensor:
        """Those that are not here are read from the directory first: nobody else may have them any more."""
        slot_A = self._slot_E[experts_A]
        if len(slot_A) and int(slot_A.min()) < 0:
            self.add(sorted(set(experts_A[slot_A < 0].tolist())))
            slot_A = self._slot_E[experts_A]
        return slot_A

    def add(self, experts: Iterable[int]) -> None:
        """In slots of their own, behind the others."""
        new = [expert for expert in experts if self._slot_E[expert] < 0]
        if not new:
            return
        read = [self.reader.read(self.layer, expert) for expert in new]
        self._gate_up = _joined(self._gate_up, [expert.gate_up_GD for expert in read])
        self._down = _joined(self._down, [expert.down_DF for expert in read])
        for expert in new:
            self._slot_E[expert] = len(self.held)
            self.held.append(expert)

    def keep(self, experts: Sequence[int]) -> int:
        """Hold exactly these; how many had to be read. New ones take the slots of those that go."""
        missing = [expert for expert in experts if expert not in self.held]
        free = [slot for slot, expert in enumerate(self.held) if expert not in experts]
        for slot, expert in zip(free, missing):
            self.put(slot, expert, self.reader.read(self.layer, expert))
        self.add(missing[len(free) :])
        if left := free[len(missing) :]:
            self._drop(left)
        return len(missing)

    def put(self, slot: int, expert: int, weights: Expert) -> None:
        """Another expert in the place of one."""
        self._slot_E[self.held[slot]] = -1
        for matrices, new in ((self._gate_up, weights.gate_up_GD), (self._down, weights.down_DF)):
            matrices[slot] = new
        self.held[slot] = expert
        for at, own in enumerate(self.held):  # also where the one that went has another slot
            self._slot_E[own] = at

    def _drop(self, slots: list[int]) -> None:
        left = [slot for slot in range(len(self.held)) if slot not in slots]
        self._gate_up, self._down = _chosen(self._gate_up, left), _chosen(self._down, left)
        self.held = [self.held[slot] for slot in left]
        self._slot_E.fill_(-1)
        for at, own in enumerate(self.held):
            self._slot_E[own] = at


def _joined(held: Any, new: list[Any]) -> Any:
    if isinstance(new[0], QuantizedWeight):
        return nn.ModuleList([*(held or ()), *new])
    fresh = torch.stack(new)
    return fresh if held is None else torch.cat([held, fresh])


def _chosen(held: Any, slots: list[int]) -> Any:
    return nn.ModuleList(held[slot] for slot in slots) if isinstance(held, nn.ModuleList) else held[slots].clone()


def _bytes(part: Any) -> int:
    if isinstance(part, Tensor):
        return part.numel() * part.element_size()
    return sum(matrix.bytes for matrix in part)
