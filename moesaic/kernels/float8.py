"""Matmuls in float8 to train with (DeepSeek-V3): what they mean, in plain PyTorch, and the kernels that make them.

Weights are rounded to e4m3 in blocks of 128 x 128 with a scale each, inputs and the gradients of outputs in groups of
128 per row. Forward and the gradients of inputs are matmuls of what was rounded, summed in float32; the gradients of
weights are made of what was not, in the model's dtype. Embedding, router, norms, LM head and attention itself are as
they were. Nothing is kept from step to step: a weight is rounded in every forward pass, which its backward pass uses.

    model.ops = Float8Kernels(model.ops, ReferenceFloat8())
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.kernels.exact_forward import needs_grad
from moesaic.kernels.interface import Kernels, Routes
from moesaic.kernels.layer_weights import ExpertWeights
from moesaic.kernels.reference import combine, dispatch, gated
from moesaic.kernels.wrapped import WrappedKernels

BLOCK = 128  # inputs, and outputs, that share a scale
LARGEST = 448.0  # of e4m3
TINY = 1e-12  # the scale of zeros
# Call sites that stay as they are: what chooses experts or keys, what experts are mixed by, and what latents are
# expanded by (queries absorb it).
LEFT = {"router", "indexer", "residual", "shared_gate", "kv_up"}


def row_numbers(x_TI: Tensor) -> tuple[Tensor, Tensor]:
    """Float8 numbers of rows, and the scale of each 128 inputs (T, G)."""
    parts_TGB = F.pad(x_TI.float(), (0, -x_TI.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK))
    scales_TG = (parts_TGB.abs().amax(-1) / LARGEST).clamp(min=TINY)
    numbers_TI = (parts_TGB / scales_TG[..., None]).flatten(-2)[..., : x_TI.shape[-1]]
    return numbers_TI.to(torch.float8_e4m3fn), scales_TG


def block_numbers(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Of a matrix, or those of experts: each block's largest number becomes the largest there is."""
    outputs, inputs = weight.shape[-2:]
    padded = F.pad(weight.float(), (0, -inputs % BLOCK, 0, -outputs % BLOCK))
    blocks = padded.unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, BLOCK))
    scales = (blocks.abs().amax((-3, -1)) / LARGEST).clamp(min=TINY)
    numbers = (blocks / scales[..., :, None, :, None]).flatten(-4, -3).flatten(-2, -1)
    return numbers[..., :outputs, :inputs].to(torch.float8_e4m3fn).contiguous(), scales


def rounded_rows(x_TI: Tensor) -> Tensor:
    """What rows become, in float32."""
    numbers, scales = row_numbers(x_TI)
    return numbers.float() * scales.repeat_interleave(BLOCK, -1)[..., : x_TI.shape[-1]]


def rounded_blocks(weight: Tensor) -> Tensor:
    """What a matrix becomes, in float32."""
    (numbers, scales), (outputs, inputs) = block_numbers(weight), weight.shape[-2:]
    spread = scales.repeat_interleave(BLOCK, -2)[..., :outputs, :].repeat_interleave(BLOCK, -1)[..., :inputs]
    return numbers.float() * spread


class Float8Matmuls(Protocol):
    """Matmuls with gradients, in float8 where the docstring of this file says so."""

    def linear(self, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor: ...

    def experts(self, x_TD: Tensor, routes: Routes, weights: ExpertWeights) -> Tensor: ...


class Float8Kernels(WrappedKernels):
    """Any kernels, whose matmuls inside layers are in float8 where a gradient is wanted. Without one (evaluation) they
    are the plain ones: a model is judged by the weights that will be saved."""

    def __init__(self, plain: Kernels, matmuls: Float8Matmuls) -> None:
        super().__init__(plain)
        self._matmuls = matmuls

    def linear(self, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None, site: str = "") -> Tensor:
        parts = site.split(".")
        if parts[0] != "layers" or LEFT & set(parts) or not needs_grad(x_TI, weight_OI, bias_O):
            return self.plain.linear(x_TI, weight_OI, bias_O, site)
        return self._matmuls.linear(x_TI, weight_OI, bias_O)

    def experts(self, x_TD: Tensor, routes: Routes, weights: ExpertWeights) -> Tensor:
        if not needs_grad(x_TD, routes.weights_TK, weights.gate_up_EGD, weights.down_EDF):
            return self.plain.experts(x_TD, routes, weights)
        return self._matmuls.experts(x_TD, routes, weights)


class ReferenceFloat8:
    """On any device, at the speed of float32: only the rounding is that of float8."""

    def linear(self, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        out_TO: Tensor = _Rounded.apply(x_TI, weight_OI)
        return out_TO if bias_O is None else out_TO + bias_O

    def experts(self, x_TD: Tensor, routes: Routes, weights: ExpertWeights) -> Tensor:
        sent, rows = dispatch(x_TD, routes, len(weights.gate_up_EGD)), []
        for expert, x_AD in enumerate(sent.x_AD.split(sent.counts_E.tolist())):
            bias_G = None if weights.bias_EG is None else weights.bias_EG[expert]
            hidden_AF = gated(self.linear(x_AD, weights.gate_up_EGD[expert], bias_G), weights.activation)
            rows.append(self.linear(hidden_AF, weights.down_EDF[expert], None))
        return combine((torch.cat(rows) * sent.weights_A1).to(x_TD.dtype), sent)


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TI: Tensor, weight_OI: Tensor) -> Tensor:
        ctx.save_for_backward(x_TI, weight_OI)
        return (rounded_rows(x_TI) @ rounded_blocks(weight_OI).T).to(x_TI.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x_TI, weight_OI), d_out_TO = ctx.saved_tensors, grads[0]
        d_x_TI = d_weight_OI = None
        if ctx.needs_input_grad[0]:
            d_x_TI = (rounded_rows(d_out_TO) @ rounded_blocks(weight_OI)).to(x_TI.dtype)
        if ctx.needs_input_grad[1]:
            d_weight_OI = d_out_TO.T @ x_TI
        return d_x_TI, d_weight_OI
