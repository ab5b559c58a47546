"""A matrix and an optional bias: the seam where quantized weights and adapters take the place of plain ones."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moesaic.kernels import Kernels


class Linear(nn.Module):
    def __init__(self, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None

    def forward(self, x_TI: Tensor, ops: Kernels) -> Tensor:
        return ops.linear(x_TI, self.weight, self.bias)


class Norm(nn.Module):
    """RMS normalisation."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x_TD: Tensor, ops: Kernels) -> Tensor:
        return ops.rms_norm(x_TD, self.weight, self.eps)
