"""In what form experts lie in slots, and what kernels are given of them: plain matrices stacked, quantized ones stacked
as a GPU's kernels take them, or, on a CPU, bytes of quantized matrices of which each expert has its own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from moesaic.kernels.layer_weights import ExpertWeights
from moesaic.model.experts import MixtureFeedForward
from moesaic.serve.offload.layer_store import bytes_of, laid_out
from moesaic.serve.offload.weights import leaves_of, tensors_of


class TensorSpec(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class ExpertForm:
    """Of a layer: how many experts, the tensors of a slot, and what kernels are given of all slots."""

    count: int
    specs: tuple[TensorSpec, ...]
    weights: Callable[[Sequence[Tensor]], ExpertWeights]

    @property
    def bytes(self) -> int:
        return sum(spec.bytes for spec in self.specs)


def plain_form(ffn: MixtureFeedForward, dtype: torch.dtype) -> ExpertForm:
    """`ffn` has the shapes of all experts."""
    specs = tuple(TensorSpec(tuple(matrix.shape[1:]), dtype) for matrix in (ffn.gate_up_EGD, ffn.down_EDF))

    def weights(slots: Sequence[Tensor]) -> ExpertWeights:
        return ExpertWeights(slots[0], slots[1], ffn.activation, ffn.site)

    return ExpertForm(len(ffn.gate_up_EGD), specs, weights)


def stacked_form(ffn: MixtureFeedForward, gate_up: Any, down: Any) -> tuple[ExpertForm, list[Tensor]]:
    """Of matrices that are stacked by expert, quantized or not, and all their tensors (experts, ...)."""
    tensors = [tensor for matrix in (gate_up, down) for tensor in _stacked(matrix)]
    specs = tuple(TensorSpec(tuple(tensor.shape[1:]), tensor.dtype) for tensor in tensors)
    # Shapes and facts alone, not the values.
    blank_gate_up, blank_down = (_rebound(matrix, [t[:0] for t in _stacked(matrix)]) for matrix in (gate_up, down))

    def weights(slots: Sequence[Tensor]) -> ExpertWeights:
        split = len(_stacked(blank_gate_up))
        matrices = _rebound(blank_gate_up, slots[:split]), _rebound(blank_down, slots[split:])
        return ExpertWeights(*matrices, ffn.activation, ffn.site)

    return ExpertForm(len(tensors[0]), specs, weights), tensors


def _stacked(matrix: Any) -> list[Tensor]:
    return [matrix] if isinstance(matrix, Tensor) else tensors_of(matrix)


def _rebound(matrix: Any, tensors: Sequence[Tensor]) -> Any:
    """The same matrices with other tensors, of so many experts as those have."""
    if isinstance(matrix, Tensor):
        return tensors[0]
    made = copy.copy(matrix)
    made._buffers = dict(matrix._buffers)
    for leaf, tensor in zip(leaves_of(made), tensors, strict=True):
        leaf.assign(tensor)
    made.shape = torch.Size((len(tensors[0]), *matrix.shape[1:]))
    return made


class ListedExperts(nn.ModuleList):
    """A matrix for each expert, which is there once `hold` has returned."""

    hold: Callable[[int], None]

    def __getitem__(self, expert: Any) -> Any:
        self.hold(expert)
        return super().__getitem__(expert)


@dataclass(frozen=True)
class ListedForm(ExpertForm):
    """Quantized matrices as a CPU's kernels take them: one expert after the other, by its number. Experts may be
    quantized to different bits, so a slot is as many bytes as the largest needs."""

    gate_up: ListedExperts
    down: ListedExperts

    @classmethod
    def of(cls, ffn: MixtureFeedForward, gate_up: nn.ModuleList, down: nn.ModuleList) -> ListedForm:
        pairs = list(zip(gate_up, down, strict=True))
        size = max(bytes_of(tensors_of(nn.ModuleList(pair))) for pair in pairs)
        for pair in pairs:
            for leaf in leaves_of(nn.ModuleList(pair)):
                leaf.assign(torch.empty_like(leaf.tensor, device="meta"))
        listed = ListedExperts(gate_up), ListedExperts(down)

        def weights(slots: Sequence[Tensor]) -> ExpertWeights:
            return ExpertWeights(*listed, ffn.activation, ffn.site)

        return cls(len(pairs), (TensorSpec((size,), torch.uint8),), weights, *listed)

    def bind(self, expert: int, slot: Tensor) -> None:
        """Let an expert's matrices be what lies in these bytes."""
        pair = nn.ModuleList([nn.ModuleList.__getitem__(matrices, expert) for matrices in (self.gate_up, self.down)])
        leaves = leaves_of(pair)
        for leaf, view in zip(leaves, laid_out(slot, [leaf.tensor for leaf in leaves]), strict=True):
            leaf.assign(view)
