"""A loss that arises inside a pipeline, such as a router's balance loss in a stage that is not the last: it joins the
backward pass where it arose, without travelling (as Megatron-LM does)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _WithLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_TD: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(torch.ones_like(loss))
        return rows_TD.clone()  # a schedule detaches what a stage puts out, which a view refuses

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        return gradients[0], ctx.saved_tensors[0]


def with_loss(rows_TD: Tensor, loss: Tensor) -> Tensor:
    """The same rows; the gradient of `loss` is added when theirs comes back."""
    rows: Tensor = _WithLoss.apply(rows_TD, loss)
    return rows
