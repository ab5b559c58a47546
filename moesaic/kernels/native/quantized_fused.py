"""Layers of few bits as one native call, one or all of them, as `block.py` and `layers.py` are for plain ones."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from moesaic.kernels import Batch
from moesaic.kernels.native.fused_layer import FACTORS, MOST_TOKENS, NUMBERS
from moesaic.kernels.native.fused_model import FusedModel
from moesaic.kernels.quantized import QuantizedMatrix, padded

PLAIN = (
    "attention_norm", "q_norm", "k_norm", "ffn_norm", "qkv_bias", "out_bias", "gate_up_bias", "down_bias", "router",
    "correction",
)  # fmt: skip
QUANTISED = ("qkv", "out", "gate_up", "down", "experts_gate_up", "experts_down")


class _Matrix(ctypes.Structure):
    """Addresses are numbers, so that a model that holds them can be copied."""

    _fields_ = [
        *((name, ctypes.c_size_t) for name in ("codes", "scales", "zeros")),
        *((name, ctypes.c_long) for name in ("inputs", "outputs", "bits", "group", "planes", "padded", "groups")),
    ]


class _Block(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_size_t) for name in PLAIN + QUANTISED),
        *((name, ctypes.c_long) for name in NUMBERS),
        *((name, ctypes.c_float) for name in FACTORS),
    ]


def _matrix(of: QuantizedMatrix) -> _Matrix:
    outputs, inputs = of.shape
    zeros = 0 if of.zeros_XGO is None else of.zeros_XGO.data_ptr()
    planes, whole = 1 if of.activation_bits == 8 else 2, padded(inputs)
    sizes = (inputs, outputs, of.bits, of.group, planes, whole, -(-inputs // of.group))
    return _Matrix(of.tiles_XB.data_ptr(), of.scales_XGO.data_ptr(), zeros, *sizes)


class QuantizedFusedLayer:
    """What a layer is made of: plain vectors and matrices of few bits in the order above, then sizes and factors."""

    def __init__(
        self,
        plain: Sequence[Tensor | None],
        quantized: Sequence[Sequence[QuantizedMatrix] | None],
        numbers: tuple[int, ...],
        factors: tuple[float, ...],
    ) -> None:
        self.matrices = tuple(plain)
        self.quantized = [list(group or ()) for group in quantized]
        self.numbers, self.factors = numbers, factors
        # Rows are rounded once for all experts.
        self.alike = all(len({(m.group, m.activation_bits) for m in group}) <= 1 for group in self.quantized)
        self._address = 0
        self._arrays: list[Any] = []  # what the addresses in the block lead to
        self._block = _Block()

    def block(self) -> _Block:
        """As native code reads it; made anew when the weights have moved."""
        address = self.address
        if address != self._address:
            self._arrays = [(_Matrix * len(group))(*map(_matrix, group)) for group in self.quantized]
            places = [0 if tensor is None else tensor.data_ptr() for tensor in self.matrices]
            places += [ctypes.addressof(array) if len(array) else 0 for array in self._arrays]
            self._block = _Block(*places, *self.numbers, *self.factors)
            self._address = address
        return self._block

    @property
    def address(self) -> int:
        """Where the first matrix lies: weights are moved all at once or not at all."""
        return next(group[0] for group in self.quantized if group).tiles_XB.data_ptr()

    def fit(self) -> bool:
        plain = all(m is None or (m.is_cpu and m.dtype == torch.float32 and m.is_contiguous()) for m in self.matrices)
        return self.alike and plain

    def takes(self, x_TD: Tensor, layout: Batch, slabs: dict[str, Tensor] | None) -> bool:
        return (
            len(x_TD) <= MOST_TOKENS
            and slabs is not None
            and not layout.branches
            and not torch.is_grad_enabled()
            and x_TD.is_cpu
            and x_TD.dtype == torch.float32
            and slabs["keys"].dtype == torch.float32
            and self.fit()
        )

    def run(
        self,
        library: Any,
        x_TD: Tensor,
        cos_TR: Tensor,
        sin_TR: Tensor,
        layout: Batch,
        slabs: dict[str, Tensor],
    ) -> tuple[Tensor, Tensor]:
        """What comes out, and the experts that were chosen (T, K)."""
        y_TD, (routes_TK,) = QuantizedFusedModel([self], [None]).run(library, x_TD, cos_TR, sin_TR, layout, [slabs])
        return y_TD, routes_TK


class QuantizedFusedModel(FusedModel):
    """Several layers in one call."""

    def __init__(self, layers: Sequence[QuantizedFusedLayer], routers: Sequence[int | None]) -> None:
        self.layers: list[Any] = list(layers)
        self.routers = list(routers)
        self.per_token = [layer.numbers[NUMBERS.index("K")] for layer in layers]
        self.alike = len(set(self.per_token) - {0}) <= 1
        self.addresses = []
        self.blocks: Any = (_Block * len(self.layers))()
        self.takes()

    def takes(self) -> bool:
        layers = cast("list[QuantizedFusedLayer]", self.layers)
        addresses = [layer.address for layer in layers]
        if addresses != self.addresses:
            self.addresses = addresses
            self.fit = self.alike and all(layer.fit() for layer in layers)
            for number, layer in enumerate(layers):
                self.blocks[number] = layer.block()
        return self.fit

    def call(self, library: Any) -> Callable[..., None]:
        return cast("Callable[..., None]", library.quantized_layers)
