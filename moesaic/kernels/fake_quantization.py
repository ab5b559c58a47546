"""Fake quantization: kernels that multiply by what a weight will be once it is quantized, for training.

Rows are rounded to 8 bits as well where the served matrix will do so (W8A8, W4A8), those between the two matrices of an
expert too. Gradients pass by the rounding (the straight-through estimator, Bengio et al. 2013).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.kernels.grid import Grid
from moesaic.kernels.interface import Kernels, Routes
from moesaic.kernels.layer_weights import ExpertWeights
from moesaic.kernels.quantized import rounded_to_8_bits
from moesaic.kernels.wrapped import WrappedKernels

# By call site, what a weight is rounded to; None leaves it as it is.
Rounding = Callable[[str, Tensor], Tensor | None]


class FakeQuantizedKernels(WrappedKernels):
    def __init__(self, plain: Kernels, rounding: Rounding, activation_bits: int = 16) -> None:
        super().__init__(plain)
        self._rounding, self._activation_bits = rounding, activation_bits

    def linear(self, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None, site: str = "") -> Tensor:
        rounded_OI = self._rounded(site, weight_OI)
        if rounded_OI is None:
            return self.plain.linear(x_TI, weight_OI, bias_O, site)
        return self.plain.linear(self._rows(x_TI), rounded_OI, bias_O, site)

    def experts(self, x_TD: Tensor, routes: Routes, weights: ExpertWeights) -> Tensor:
        gate_up_EGD = self._rounded(f"{weights.site}.gate_up_EGD", weights.gate_up_EGD)
        down_EDF = self._rounded(f"{weights.site}.down_EDF", weights.down_EDF)
        if gate_up_EGD is None or down_EDF is None:
            return self.plain.experts(x_TD, routes, weights)
        if self._activation_bits != 8:
            return self.plain.experts(x_TD, routes, replace(weights, gate_up_EGD=gate_up_EGD, down_EDF=down_EDF))
        x_TD, out_TD = self._rows(x_TD), torch.zeros_like(x_TD)
        for expert in routes.experts_TK.unique().tolist():
            rows, choices = (routes.experts_TK == expert).nonzero(as_tuple=True)
            hidden_AF = self.plain.gated(F.linear(x_TD[rows], gate_up_EGD[expert]), weights.activation)
            y_AD = F.linear(self._rows(hidden_AF), down_EDF[expert])
            out_TD = out_TD.index_add(0, rows, y_AD * routes.weights_TK[rows, choices].to(y_AD.dtype)[:, None])
        return out_TD

    def _rounded(self, site: str, weight: Tensor) -> Tensor | None:
        rounded = self._rounding(site, weight.detach())
        return None if rounded is None else straight_through(weight, rounded)

    def _rows(self, x_TI: Tensor) -> Tensor:
        return straight_through(x_TI, rounded_to_8_bits(x_TI.detach())) if self._activation_bits == 8 else x_TI


def straight_through(tensor: Tensor, rounded: Tensor) -> Tensor:
    """The value of `rounded`, with the gradient of `tensor`."""
    return tensor + (rounded - tensor.detach())


def rounded_by(grid: Grid, weight: Tensor) -> Tensor:
    """A matrix, or all experts' of a layer, as it will be once quantized."""
    return grid.rounded(weight.float().flatten(0, -2)).view(weight.shape).to(weight.dtype)
