"""GPTQ (Frantar et al. 2022): round one input after the other, and let those still to come make up for each error.

    moesaic compress out/smollm2 --method gptq --out out/small bits=4 group=64

With the moments H of what flows into a matrix, an error e made at input i is best undone by moving the inputs that are
left along row i of the inverse of H. Inputs with large moments are rounded first, while most are left to correct them;
the steps of each group are fixed before, so that this order costs no index at run time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moesaic.compress.grid import Grid
from moesaic.compress.methods import ByMatrix
from moesaic.compress.seen import Seen
from moesaic.kernels.quantised import QuantisedMatrix

AT_ONCE = 64  # inputs whose corrections are applied to the rest in one product


@dataclass(frozen=True)
class GPTQ(ByMatrix):
    bits: int = 4
    group: int = 64
    symmetric: bool = False
    damping: float = 0.01

    def __post_init__(self) -> None:
        self._grid()
        if not 0 < self.damping <= 1:
            raise ValueError(f"damping must be above 0 and at most 1, not {self.damping}")

    def _grid(self) -> Grid:
        return Grid(self.bits, self.group, self.symmetric)

    def matrix(self, name: str, weight_OI: Tensor, seen: Seen) -> QuantisedMatrix:
        return gptq(weight_OI, seen, self._grid(), self.damping)


def gptq(weight_OI: Tensor, seen: Seen, grid: Grid, damping: float = 0.01) -> QuantisedMatrix:
    made = []
    for rows, moments_II in seen.parts(len(weight_OI)):
        scales_OG, zeros_OG = grid.fit(weight_OI[rows], moments_II.diagonal())
        made.append((gptq_codes(weight_OI[rows], moments_II, grid, scales_OG, zeros_OG, damping), scales_OG, zeros_OG))
    codes, scales, zeros = zip(*made, strict=True)
    return grid.made(torch.cat(codes), torch.cat(scales), None if zeros[0] is None else torch.cat(zeros))


def gptq_codes(
    weight_OI: Tensor,
    moments_II: Tensor,
    grid: Grid,
    scales_OG: Tensor,
    zeros_OG: Tensor | None,
    damping: float,
    kept_OI: Tensor | None = None,
) -> Tensor:
    """The codes, one per weight; where `kept` is false a weight becomes zero (for sparse matrices)."""
    inputs = weight_OI.shape[1]
    zeros_OI = float(2 ** (grid.bits - 1)) if zeros_OG is None else grid.spread(zeros_OG, inputs)
    zeros_OI = torch.as_tensor(zeros_OI).expand(weight_OI.shape)
    order_I = moments_II.diagonal().argsort(descending=True, stable=True)
    left_OI = weight_OI[:, order_I].clone()
    scales_OI, zeros_OI = grid.spread(scales_OG, inputs)[:, order_I], zeros_OI[:, order_I]
    upper_II = inverse_factor(moments_II[order_I][:, order_I], damping)
    codes_OI = torch.empty_like(left_OI)
    for start in range(0, inputs, AT_ONCE):
        stop = min(start + AT_ONCE, inputs)
        errors = torch.empty(len(left_OI), stop - start)
        for i in range(start, stop):
            column_O = left_OI[:, i]
            code_O = (column_O / scales_OI[:, i] + zeros_OI[:, i]).round_().clamp_(0, grid.top)
            if kept_OI is not None:
                code_O = torch.where(kept_OI[:, order_I[i]], code_O, zeros_OI[:, i])
            codes_OI[:, i] = code_O
            error_O = (column_O - (code_O - zeros_OI[:, i]) * scales_OI[:, i]) / upper_II[i, i]
            left_OI[:, i:stop].addr_(error_O, upper_II[i, i:stop], alpha=-1)
            errors[:, i - start] = error_O
        left_OI[:, stop:].addmm_(errors, upper_II[start:stop, stop:], alpha=-1)
    out_OI = torch.empty_like(codes_OI)
    out_OI[:, order_I] = codes_OI
    return out_OI


def inverse_factor(moments_II: Tensor, damping: float) -> Tensor:
    """The upper Cholesky factor of the inverse, with as much damping as it takes."""
    mean = moments_II.diagonal().mean().clamp(min=1e-8)
    eye_II = torch.eye(len(moments_II))
    while True:
        lower_II, failed = torch.linalg.cholesky_ex((moments_II + damping * mean * eye_II).double())
        if not failed:
            inverse_II = torch.cholesky_inverse(lower_II)
            upper_II, failed = torch.linalg.cholesky_ex(inverse_II, upper=True)
            if not failed:
                return upper_II.float()
        damping *= 10
