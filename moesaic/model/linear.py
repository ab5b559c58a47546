"""A matrix and an optional bias: the call site where quantized weights, adapters and shards stand in for plain ones."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moesaic.kernels.interface import Kernels
from moesaic.kernels.layer_weights import LinearWeights, NormWeights


class Linear(nn.Module):
    site = ""  # its path in the model, which `name_sites` sets

    def __init__(self, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None

    def forward(self, x_TI: Tensor, ops: Kernels) -> Tensor:
        return ops.linear(x_TI, self.weight, self.bias, self.site)

    def weights(self) -> LinearWeights:
        return LinearWeights(self.weight, self.bias, self.site)


class Norm(nn.Module):
    """RMS normalisation. With an offset the weight counts from one, in float32: half precision would round it away."""

    def __init__(self, size: int, eps: float, offset: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps, self.offset = eps, float(offset)

    def forward(self, x_TD: Tensor, ops: Kernels) -> Tensor:
        if self.offset:
            return ops.rms_norm(x_TD.float(), 1.0 + self.weight.float(), self.eps).to(x_TD.dtype)
        return ops.rms_norm(x_TD, self.weight, self.eps)

    def weights(self) -> NormWeights:
        return NormWeights(self.weight, self.eps)


def norm_weights(norm: Norm | None) -> NormWeights | None:
    return None if norm is None else norm.weights()


def name_sites(module: nn.Module, prefix: str = "") -> None:
    """Tell every part that calls an operation with weights of its own what it is called: its path in the model."""
    for name, part in module.named_modules(prefix=prefix):
        if hasattr(part, "site"):
            part.site = name
