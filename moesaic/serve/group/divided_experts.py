"""Experts under tensor parallelism alone: every expert is divided like a dense network.

A rank makes its hidden units of every assignment, all hidden units are gathered, and the rank makes its columns of D,
which it adds up per token in the order of experts; then columns are gathered. No sum over inputs is divided, so the
bits are those of one process.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from moesaic.kernels.interface import Kernels, Routes
from moesaic.kernels.layer_weights import ExpertWeights
from moesaic.kernels.quantized import QuantizedWeight
from moesaic.serve.group.links import Link
from moesaic.serve.group.shares import widths


def divided_experts(
    x_TD: Tensor, routes: Routes, weights: ExpertWeights, link: Link, stream: Sequence[int], plain: Kernels
) -> Tensor:
    """`stream`: how many columns of D each rank makes."""
    if not len(x_TD):
        return x_TD
    flat_A = routes.experts_TK.reshape(-1)
    order_A = flat_A.argsort(stable=True)
    token_A = order_A // routes.experts_TK.shape[1]
    counts = torch.bincount(flat_A).tolist()
    weight_A1 = routes.weights_TK.reshape(-1).index_select(0, order_A).unsqueeze(1)
    after = quantized(weights)  # quantized kernels weigh what comes out, the others what goes in

    hidden_AG = _each(plain, x_TD.index_select(0, token_A), weights.gate_up_EGD, counts)
    hidden_AF = plain.gated(hidden_AG, weights.activation)
    if not after:
        hidden_AF = hidden_AF * weight_A1.to(hidden_AF.dtype)
    inner = weights.down_EDF[0].shape[-1]
    hidden_AF = link.columns(hidden_AF, widths(inner, link.size), "expert hidden")
    y_AD = _each(plain, hidden_AF, weights.down_EDF, counts)
    if after:
        y_AD = y_AD * weight_A1.to(y_AD.dtype)
    own_TD = y_AD.new_zeros(len(x_TD), y_AD.shape[1]).index_add(0, token_A, y_AD)
    return link.columns(own_TD, stream, "stream")


def _each(plain: Kernels, x_AI: Tensor, matrices: Any, counts: list[int]) -> Tensor:
    """Rows sorted by expert, each run through its expert's matrix."""
    return torch.cat(list(_runs(plain, x_AI, matrices, counts)))


def _runs(plain: Kernels, x_AI: Tensor, matrices: Any, counts: list[int]) -> Iterator[Tensor]:
    for expert, run_AI in enumerate(x_AI.split(counts)):
        if len(run_AI):
            yield plain.linear(run_AI, matrices[expert])


def quantized(weights: ExpertWeights) -> bool:
    return isinstance(weights.gate_up_EGD[0], QuantizedWeight) or isinstance(weights.down_EDF[0], QuantizedWeight)
