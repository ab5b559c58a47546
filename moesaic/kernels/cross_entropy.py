"""The output matrix and the cross-entropy in one: logits exist for a few rows at a time, and never all at once.

Gradients are taken in the same pass, so nothing is computed twice: the caller says beforehand how much each token
counts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

IGNORED = -100
ROWS = 1024
GPU_LOGITS = 1 << 29  # at a time: every part adds a gradient as large as the output matrix
LARGEST_COUNT = 2.0**-6  # in float16: sums over a part are far from its largest number, and slopes from its smallest


def linear_cross_entropy(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    targets_T: Tensor,
    scale_T: Tensor,
    *,
    cap: float = 0.0,
    rows: int | None = None,
    site: str = "",
) -> tuple[Tensor, Tensor]:
    """The scaled sum of -log p(target), and each token's own (not differentiable). Ignored targets count nothing.

    `cap` bends logits smoothly to within ±cap (for float16); `rows` exist at a time.
    """
    if rows is None:
        rows = max(ROWS, GPU_LOGITS // len(weight_VD)) if hidden_TD.is_cuda else ROWS
    total, losses_T = _LinearCrossEntropy.apply(hidden_TD, weight_VD, targets_T, scale_T, cap, rows)
    return total, losses_T


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, scale_T: Tensor, cap: float, rows: int
    ) -> tuple[Tensor, Tensor]:
        wanted = hidden_TD.requires_grad or weight_VD.requires_grad
        losses_T = torch.zeros(len(targets_T), dtype=torch.float32, device=hidden_TD.device)
        d_hidden_TD = torch.empty_like(hidden_TD) if wanted else None
        d_weight_VD: Tensor | None = None
        # A token of a large batch counts less than float16 can tell from nothing, and a loss scale comes too late.
        lift = torch.ones((), device=scale_T.device)
        if hidden_TD.dtype == torch.float16 and len(scale_T):  # a rank may have no rows
            lift = LARGEST_COUNT / scale_T.abs().max().clamp(min=1e-30)
        for start in range(0, len(targets_T), rows):
            part = slice(start, start + rows)
            target_T = targets_T[part]
            valid_T = target_T != IGNORED
            row_T1 = target_T.clamp(min=0).unsqueeze(1)
            logits_TV = torch.mm(hidden_TD[part], weight_VD.t())
            if logits_TV.is_cuda and not cap:
                from moesaic.kernels.triton.softmax_loss import softmax_loss

                losses_T[part] = softmax_loss(logits_TV, target_T, IGNORED, gradient=wanted)
                d_logits_TV = logits_TV
            else:
                logits_TV = logits_TV.float()
                if cap:
                    logits_TV = torch.tanh(logits_TV / cap) * cap
                log_TV = logits_TV.log_softmax(-1)
                losses_T[part] = -log_TV.gather(1, row_T1).squeeze(1) * valid_T
                d_logits_TV = log_TV.exp_()
                d_logits_TV.scatter_add_(1, row_T1, d_logits_TV.new_full(row_T1.shape, -1.0))
                if cap:
                    d_logits_TV *= 1 - (logits_TV / cap).square()
                d_logits_TV = d_logits_TV.to(hidden_TD.dtype)
            if d_hidden_TD is None:
                continue
            # How much a token counts is laid on the narrow side of both products, not on its row of the vocabulary.
            counts_T1 = (scale_T[part] * lift * valid_T).unsqueeze(1).to(hidden_TD.dtype)
            torch.mm(d_logits_TV, weight_VD, out=d_hidden_TD[part]).mul_(counts_T1)
            if not weight_VD.requires_grad:  # under an adapter it is frozen
                continue
            counted_TD = hidden_TD[part] * counts_T1
            if d_weight_VD is None:
                d_weight_VD = torch.mm(d_logits_TV.t(), counted_TD)
                if start + rows < len(targets_T):
                    d_weight_VD = d_weight_VD.float()  # more will be added
            elif d_weight_VD.dtype == d_logits_TV.dtype:
                d_weight_VD.addmm_(d_logits_TV.t(), counted_TD)
            else:
                d_weight_VD += torch.mm(d_logits_TV.t(), counted_TD)
        if wanted:
            if weight_VD.requires_grad:
                d_weight_VD = torch.zeros_like(weight_VD) if d_weight_VD is None else d_weight_VD.to(weight_VD.dtype)
            assert d_hidden_TD is not None
            ctx.save_for_backward(d_hidden_TD, d_weight_VD, lift)
        ctx.mark_non_differentiable(losses_T)
        return (losses_T * scale_T).sum(), losses_T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden_TD, d_weight_VD, lift = ctx.saved_tensors
        factor = grads[0] / lift
        d_weight_VD = None if d_weight_VD is None else d_weight_VD * factor
        return d_hidden_TD * factor, d_weight_VD, None, None, None, None
