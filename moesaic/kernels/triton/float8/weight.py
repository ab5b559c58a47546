"""A weight of float8 numbers on a GPU, and the experts of a layer made of such."""

from __future__ import annotations

import torch
from torch import Tensor

from moesaic.kernels.float8 import BLOCK, block_numbers
from moesaic.kernels.interface import Routes
from moesaic.kernels.quantized import QuantizedWeight
from moesaic.kernels.triton.dependent_launch import is_hopper
from moesaic.kernels.triton.experts import rows
from moesaic.kernels.triton.experts.sort import route
from moesaic.kernels.triton.float8.matmul import matmul, round_rows, tile_rows
from moesaic.kernels.triton.float8.rounding import Rounded, round_sorted

FEW = 64  # assignments that are not sorted by expert: each is a tile of its own
MANY = 256  # rows of a matrix from which on the persistent kernel multiplies them (Hopper)
MANY_EACH = 24  # the same, of each expert's on average


class Float8Weight(QuantizedWeight):
    """(E, O, I) or, with one expert only that is none, (O, I)."""

    numbers_EOI: Tensor
    scales_ENG: Tensor  # of blocks of 128 outputs and 128 inputs

    def __init__(self, numbers: Tensor, scales: Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self.shape, self.dtype = numbers.shape, dtype
        stacked = numbers.dim() == 3
        self.register_buffer("numbers_EOI", numbers if stacked else numbers[None])
        self.register_buffer("scales_ENG", (scales if stacked else scales[None]).float().contiguous())

    @classmethod
    def rounded(cls, weight: Tensor) -> Float8Weight:
        """A plain matrix, or those of experts, in float8: each block's largest number becomes the largest there is."""
        return cls(*block_numbers(weight), weight.dtype)

    @property
    def numbers(self) -> Rounded:
        return Rounded(self.numbers_EOI, self.scales_ENG)

    @property
    def device(self) -> torch.device:
        return self.numbers_EOI.device

    def dense(self) -> Tensor:
        """What it stands for, in float32."""
        *_, outputs, inputs = self.shape
        spread = self.scales_ENG.repeat_interleave(BLOCK, 1)[:, :outputs].repeat_interleave(BLOCK, 2)[..., :inputs]
        return (self.numbers_EOI.float() * spread).view(self.shape)

    def linear(self, x_TI: Tensor, bias_O: Tensor | None = None) -> Tensor:
        rows_TI = x_TI.reshape(-1, x_TI.shape[-1]).to(self.dtype)
        if len(rows_TI) >= MANY and hopper_takes(self):
            from moesaic.kernels.triton.float8.hopper import matmul as hopper

            out_TO = hopper.matmul(round_sorted(rows_TI), self.numbers, bias_O)
            return out_TO.view(*x_TI.shape[:-1], self.shape[-2])
        numbers, scales = round_rows(rows_TI)
        out_TO = matmul(numbers, scales, self.numbers_EOI, self.scales_ENG, self.dtype, bias_O)
        return out_TO.view(*x_TI.shape[:-1], self.shape[-2])

    def extra_repr(self) -> str:
        return f"{'x'.join(map(str, self.shape))}, float8 in blocks of {BLOCK}"


def hopper_takes(weight: Float8Weight) -> bool:
    """The copy engine wants rows that start at multiples of 16 bytes."""
    outputs, inputs = weight.shape[-2:]
    return weight.dtype == torch.bfloat16 and is_hopper(weight.device) and inputs % 16 == 0 and outputs % 8 == 0


def experts(x_TD: Tensor, routes: Routes, gate_up: Float8Weight, down: Float8Weight) -> Tensor:
    """The weighted sum of each token's routed experts. Inputs are rounded once for all experts of a token."""
    (T, K), E = routes.experts_TK.shape, gate_up.shape[0]
    if not T:
        return x_TD * 1.0
    x_TD = x_TD.to(gate_up.dtype)
    if T * K >= MANY_EACH * E and hopper_takes(gate_up) and down.shape[-1] % BLOCK == 0:
        return experts_of_many(x_TD, routes, gate_up, down)
    numbers_TD, scales_TG = round_rows(x_TD)
    first, second = (gate_up.numbers_EOI, gate_up.scales_ENG), (down.numbers_EOI, down.scales_ENG)
    if T * K <= FEW:
        routes_TK = routes.experts_TK.contiguous()
        gate_up_NG = matmul(numbers_TD, scales_TG, *first, gate_up.dtype, routes_TK=routes_TK, choices=K)
        hidden = round_rows(gate_up_NG, gated=True)
        out_ND = matmul(*hidden, *second, down.dtype, routes_TK=routes_TK)
        return rows.combine_tokens(out_ND, routes.weights_TK.contiguous())
    routing = route(routes.experts_TK.contiguous(), E, tile_rows(T * K // E))
    # float8 rows travel as bytes: nothing that moves them need know what they are.
    numbers_PD = rows.permute(numbers_TD.view(torch.bfloat16), routing, K).view(torch.float8_e4m3fn)
    scales_PG = rows.permute(scales_TG, routing, K)
    gate_up_PG = matmul(numbers_PD, scales_PG, *first, gate_up.dtype, routing=routing)
    out_PD = matmul(*round_rows(gate_up_PG, gated=True), *second, down.dtype, routing=routing)
    return rows.combine(out_PD, routing, routes.weights_TK.contiguous(), T, K)


def experts_of_many(x_TD: Tensor, routes: Routes, gate_up: Float8Weight, down: Float8Weight) -> Tensor:
    """Two matmuls, the first of which leaves rounded hidden rows."""
    from moesaic.kernels.triton.float8.hopper import matmul as hopper

    T, K = routes.experts_TK.shape
    routing = route(routes.experts_TK.contiguous(), gate_up.shape[0], hopper.ALIGN)
    sorted_PD = round_sorted(x_TD, routing, K)
    _, hidden_PF = hopper.gate_up(sorted_PD, gate_up.numbers, routing, save=False)
    out_PD = hopper.matmul(hidden_PF, down.numbers, routing=routing)
    return rows.combine(out_PD, routing, routes.weights_TK.contiguous(), T, K)


def has_float8(device: torch.device) -> bool:
    """Whether tensor cores multiply float8 in the way these kernels are measured for: Hopper and later."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
