"""A whole layer as one native call: between small operations Python takes longer than the operations do."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from moesaic.kernels import Batch

# Above this many tokens the operations are long, and nothing is gained.
MOST_TOKENS = 64

MATRICES = (
    "attention_norm", "qkv", "qkv_bias", "q_norm", "k_norm", "out", "out_bias", "ffn_norm", "gate_up", "gate_up_bias",
    "down", "down_bias", "router", "correction", "experts_gate_up", "experts_down",
)  # fmt: skip
NUMBERS = (
    "D", "H", "N", "C", "F", "E", "K", "G", "groups", "top_groups", "window", "interleaved", "softmax", "normalize",
)  # fmt: skip
FACTORS = ("eps", "attention_scale", "route_scale")


class _Block(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in MATRICES),
        *((name, ctypes.c_long) for name in NUMBERS),
        *((name, ctypes.c_float) for name in FACTORS),
    ]


@dataclass(frozen=True)
class FusedLayer:
    """What a layer is made of: its matrices (None where it has none), its sizes and factors, in the order above."""

    matrices: tuple[Tensor | None, ...]
    numbers: tuple[int, ...]
    factors: tuple[float, ...]

    def takes(self, x_TD: Tensor, layout: Batch, slabs: dict[str, Tensor] | None) -> bool:
        """Whether the call can be made as things are: few tokens of float32 on a CPU, in lines, with a cache."""
        return (
            len(x_TD) <= MOST_TOKENS
            and slabs is not None
            and not layout.branches
            and not torch.is_grad_enabled()
            and x_TD.is_cpu
            and x_TD.dtype == torch.float32
            and slabs["keys"].dtype == torch.float32
            and all(m is None or (m.dtype == torch.float32 and m.is_contiguous()) for m in self.matrices)
        )

    def run(
        self,
        library: ctypes.CDLL,
        x_TD: Tensor,
        cos_TR: Tensor,
        sin_TR: Tensor,
        layout: Batch,
        slabs: dict[str, Tensor],
    ) -> tuple[Tensor, Tensor]:
        """What comes out, and the experts that were chosen (T, K)."""
        pointers = [None if matrix is None else matrix.data_ptr() for matrix in self.matrices]
        block = _Block(*pointers, *self.numbers, *self.factors)
        x_TD, cos_TR, sin_TR = x_TD.contiguous(), cos_TR.contiguous(), sin_TR.contiguous()
        y_TD = torch.empty_like(x_TD)
        routes_TK = torch.empty(len(x_TD), block.K, dtype=torch.int64)
        spans_S4, pages_SP, keys = layout.spans_S4, layout.pages_SP, slabs["keys"]
        assert pages_SP is not None
        library.block(
            ctypes.byref(block), x_TD.data_ptr(), y_TD.data_ptr(), routes_TK.data_ptr(), cos_TR.data_ptr(),
            sin_TR.data_ptr(), cos_TR.shape[1], keys.data_ptr(), slabs["values"].data_ptr(), spans_S4.data_ptr(),
            pages_SP.data_ptr(), len(x_TD), len(spans_S4), pages_SP.shape[1], keys.shape[1], torch.get_num_threads(),
        )  # fmt: skip
        return y_TD, routes_TK
