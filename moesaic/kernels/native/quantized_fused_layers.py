"""Layers of quantized matrices as one native call, as `fused_layers.py` has it for plain ones."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from torch import nn

from moesaic.kernels.layer_weights import LayerWeights
from moesaic.kernels.native.fused_layers import FusedLayers, block_fields, float32, known
from moesaic.kernels.quantized import QuantizedMatrix, padded

PLAIN = (
    "attention_norm", "q_norm", "k_norm", "ffn_norm", "qkv_bias", "out_bias", "gate_up_bias", "down_bias", "router",
    "correction",
)  # fmt: skip
QUANTIZED = ("qkv", "out", "gate_up", "down", "experts_gate_up", "experts_down")


class Matrix(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_size_t) for name in ("codes", "scales", "zeros")),
        *((name, ctypes.c_long) for name in ("inputs", "outputs", "bits", "group", "planes", "padded", "groups")),
    ]


class QuantizedBlock(ctypes.Structure):
    _fields_ = block_fields(PLAIN + QUANTIZED)


def as_matrix(of: QuantizedMatrix) -> Matrix:
    outputs, inputs = of.shape
    zeros = 0 if of.zeros_XGO is None else of.zeros_XGO.data_ptr()
    planes, whole = 1 if of.activation_bits == 8 else 2, padded(inputs)
    sizes = (inputs, outputs, of.bits, of.group, planes, whole, -(-inputs // of.group))
    return Matrix(of.tiles_XB.data_ptr(), of.scales_XGO.data_ptr(), zeros, *sizes)


class QuantizedFusedLayers(FusedLayers):
    function = "quantized_layers"

    def __init__(self, layers: Sequence[LayerWeights]) -> None:
        super().__init__(layers)
        self.groups = [[_matrices(part.weights[name]) for name in QUANTIZED] for part in self.parts]
        self.arrays: list[list[Any]] = [[] for _ in self.parts]  # what the addresses in the blocks lead to

    def block_type(self) -> Any:
        return QuantizedBlock

    def now(self) -> list[int]:
        """Where each layer's first matrix lies: weights are moved all at once or not at all."""
        return [next(group[0] for group in groups if group).tiles_XB.data_ptr() for groups in self.groups]

    def fits(self) -> bool:
        plain = [part.weights[name] for part in self.parts for name in PLAIN]
        # Rows are rounded once for all experts.
        rounded = [{(m.group, m.activation_bits) for m in group} for groups in self.groups for group in groups]
        return self.alike and all(w is None or float32(w) for w in plain) and all(len(ways) <= 1 for ways in rounded)

    def block(self, number: int) -> QuantizedBlock:
        part = self.parts[number]
        self.arrays[number] = [(Matrix * len(group))(*map(as_matrix, group)) for group in self.groups[number]]
        places = [0 if (weight := part.weights[name]) is None else weight.data_ptr() for name in PLAIN]
        places += [ctypes.addressof(array) if len(array) else 0 for array in self.arrays[number]]
        return QuantizedBlock(*places, *part.sizes, *part.factors)


def _matrices(weight: Any) -> list[Any]:
    return [] if weight is None else list(weight) if isinstance(weight, nn.ModuleList) else [weight]


def fused(layers: Sequence[LayerWeights]) -> FusedLayers | None:
    """Layers ready for the one call; None where one of them has parts that it does not know, or only some of their
    matrices are quantized."""
    if not all(map(known, layers)):
        return None
    plain = FusedLayers(layers)
    matrices = [m for part in plain.parts for name in QUANTIZED for m in _matrices(part.weights[name])]
    quantized = [isinstance(matrix, QuantizedMatrix) for matrix in matrices]
    if not any(quantized):
        return None if any(isinstance(matrix, nn.Module) for matrix in matrices) else plain
    if all(quantized) and all(matrix.up_OR is None for matrix in matrices):
        return QuantizedFusedLayers(layers)
    return None
