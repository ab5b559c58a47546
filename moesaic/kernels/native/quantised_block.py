"""A whole layer of few bits as one native call, as `block.py` is for plain ones."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moesaic.kernels import Batch
from moesaic.kernels.native.block import FACTORS, MOST_TOKENS, NUMBERS
from moesaic.kernels.quantised import QuantisedMatrix, padded

PLAIN = (
    "attention_norm", "q_norm", "k_norm", "ffn_norm", "qkv_bias", "out_bias", "gate_up_bias", "down_bias", "router",
    "correction",
)  # fmt: skip
QUANTISED = ("qkv", "out", "gate_up", "down", "experts_gate_up", "experts_down")


class _Matrix(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("codes", "scales", "zeros")),
        *(
            (name, ctypes.c_long)
            for name in ("inputs", "outputs", "bits", "group", "planes", "padded", "groups", "row_bytes")
        ),
    ]


class _Block(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in PLAIN + QUANTISED),
        *((name, ctypes.c_long) for name in NUMBERS),
        *((name, ctypes.c_float) for name in FACTORS),
    ]


def _matrix(of: QuantisedMatrix) -> _Matrix:
    outputs, inputs = of.shape
    zeros = None if of.zeros_GO is None else of.zeros_GO.data_ptr()
    planes, whole = 1 if of.activation_bits == 8 else 2, padded(inputs)
    sizes = (inputs, outputs, of.bits, of.group, planes, whole, -(-inputs // of.group), whole // 8 * of.bits)
    return _Matrix(of.codes.data_ptr(), of.scales_GO.data_ptr(), zeros, *sizes)


class QuantisedWhole:
    """What a layer is made of: plain vectors and matrices of few bits in the order above, then sizes and factors."""

    def __init__(
        self,
        plain: Sequence[Tensor | None],
        quantised: Sequence[Sequence[QuantisedMatrix] | None],
        numbers: tuple[int, ...],
        factors: tuple[float, ...],
    ) -> None:
        self.matrices = tuple(plain)
        self._first = next(group[0] for group in quantised if group)
        self._address = self._first.codes.data_ptr()
        self._numbers = numbers
        self._kept: list[Any] = [list(group or ()) for group in quantised]
        arrays = [(_Matrix * len(group))(*map(_matrix, group)) if group else None for group in quantised]
        self._kept.append(arrays)  # what the pointers below lead to
        pointers = [None if tensor is None else tensor.data_ptr() for tensor in plain]
        addresses = [None if array is None else ctypes.addressof(array) for array in arrays]
        self._block = _Block(*pointers, *addresses, *numbers, *factors)

    def takes(self, x_TD: Tensor, layout: Batch, slabs: dict[str, Tensor] | None) -> bool:
        return (
            len(x_TD) <= MOST_TOKENS
            and slabs is not None
            and not layout.branches
            and not torch.is_grad_enabled()
            and x_TD.is_cpu
            and x_TD.dtype == torch.float32
            and slabs["keys"].dtype == torch.float32
            and self._address == self._first.codes.data_ptr()
            and all(m is None or (m.dtype == torch.float32 and m.is_contiguous()) for m in self.matrices)
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
        x_TD, cos_TR, sin_TR = x_TD.contiguous(), cos_TR.contiguous(), sin_TR.contiguous()
        y_TD = torch.empty_like(x_TD)
        routes_TK = torch.empty(len(x_TD), self._block.K, dtype=torch.int64)
        spans_S4, pages_SP, keys = layout.spans_S4, layout.pages_SP, slabs["keys"]
        assert pages_SP is not None
        library.quantised_block(
            ctypes.byref(self._block), x_TD.data_ptr(), y_TD.data_ptr(), routes_TK.data_ptr(), cos_TR.data_ptr(),
            sin_TR.data_ptr(), cos_TR.shape[1], keys.data_ptr(), slabs["values"].data_ptr(), spans_S4.data_ptr(),
            pages_SP.data_ptr(), len(x_TD), len(spans_S4), pages_SP.shape[1], keys.shape[1], torch.get_num_threads(),
        )  # fmt: skip
        return y_TD, routes_TK
