"""All layers of a short step as one native call: Python between two of them finds every cache full of weights."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor

from moesaic.kernels import Batch
from moesaic.kernels.native.fused_layer import FACTORS, MATRICES, NUMBERS, FusedLayer

# A step of more tokens is long, and somebody more urgent may come between its layers.
MOST_TOKENS = 16


class _Block(ctypes.Structure):
    """As in block.c. Addresses are numbers here, so that a model that holds a stack can be copied."""

    _fields_ = [
        *((name, ctypes.c_size_t) for name in MATRICES),
        *((name, ctypes.c_long) for name in NUMBERS),
        *((name, ctypes.c_float) for name in FACTORS),
    ]


class FusedModel:
    """The layers of a model, with the addresses of their matrices as they were when last looked at."""

    def __init__(self, layers: Sequence[FusedLayer], routers: Sequence[int | None]) -> None:
        self.layers = list(layers)
        self.routers = list(routers)  # the number of each layer's router, where it has one
        self.matrices = [matrix for layer in layers for matrix in layer.matrices if matrix is not None]
        self.per_token = [layer.numbers[NUMBERS.index("K")] for layer in layers]
        self.addresses: list[int] = []
        self.fit = len(set(self.per_token) - {0}) <= 1
        self.blocks = (_Block * len(self.layers))()

    def takes(self) -> bool:
        """Whether all matrices are as the call wants them; looked at anew when one has moved."""
        addresses = [matrix.data_ptr() for matrix in self.matrices]
        if addresses != self.addresses:
            self.addresses = addresses
            self.fit &= all(m.is_cpu and m.dtype == torch.float32 and m.is_contiguous() for m in self.matrices)
            for number, layer in enumerate(self.layers):
                places = [0 if matrix is None else matrix.data_ptr() for matrix in layer.matrices]
                self.blocks[number] = _Block(*places, *layer.numbers, *layer.factors)
        return self.fit

    def call(self, library: ctypes.CDLL) -> Callable[..., None]:
        """The native function that takes such blocks."""
        return cast("Callable[..., None]", library.layers)

    def run(
        self,
        library: ctypes.CDLL,
        x_TD: Tensor,
        cos_TR: Tensor,
        sin_TR: Tensor,
        layout: Batch,
        slabs: Sequence[dict[str, Tensor]],
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """What comes out of the last layer, and the experts that were chosen in each (T, K)."""
        tokens, per_token = x_TD.shape[0], max(self.per_token)
        x_TD, cos_TR, sin_TR = x_TD.contiguous(), cos_TR.contiguous(), sin_TR.contiguous()
        y_TD = torch.empty_like(x_TD)
        routes_LTK = torch.empty(len(self.layers), tokens, per_token, dtype=torch.int64)
        spans_S4, pages_SP = layout.spans_S4, layout.pages_SP
        assert pages_SP is not None
        places = [slab.data_ptr() for layer in slabs for slab in (layer["keys"], layer["values"])]
        self.call(library)(
            ctypes.byref(self.blocks), len(self.layers), x_TD.data_ptr(), y_TD.data_ptr(), routes_LTK.data_ptr(),
            cos_TR.data_ptr(), sin_TR.data_ptr(), cos_TR.shape[1], (ctypes.c_void_p * len(places))(*places),
            spans_S4.data_ptr(), pages_SP.data_ptr(), tokens, spans_S4.shape[0], pages_SP.shape[1],
            slabs[0]["keys"].shape[1], per_token, torch.get_num_threads(),
        )  # fmt: skip
        return y_TD, routes_LTK.unbind(0)
