"""log p(token) of every row, differentiable, without ever holding all logits: a few rows at a time, and once more on
the way back.

Objectives that are functions of log-probabilities (preferences, policies, distances between policies) are written as
such, in plain PyTorch over one number per token. The forward is to the bit what the engine records when it samples.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.kernels.cross_entropy import IGNORED, ROWS

Product = Callable[[Tensor, Tensor], Tensor]


def token_logprobs(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    targets_T: Tensor,
    *,
    temperature: float = 1.0,
    linear: Product = F.linear,
    kept_TK: Tensor | None = None,
    rows: int = ROWS,
) -> tuple[Tensor, Tensor]:
    """log p(target) of every row and its entropy, which has no gradient; both zero where the target is ignored.
    `linear` makes the logits: the model's own product gives the model's own bits. `kept_TK` names the tokens that a row
    was drawn among, some of them twice where there were fewer; all others are impossible."""
    wanted_W = (targets_T != IGNORED).nonzero().squeeze(1)  # questions are not predicted, and often the longer part
    logprobs_W, entropy_W = _TokenLogprobs.apply(
        hidden_TD.index_select(0, wanted_W),
        weight_VD,
        targets_T[wanted_W],
        temperature,
        linear,
        None if kept_TK is None else kept_TK[wanted_W],
        rows,
    )
    zeros_T = logprobs_W.new_zeros(len(targets_T))
    return zeros_T.index_copy(0, wanted_W, logprobs_W), zeros_T.index_copy(0, wanted_W, entropy_W)


def within(logits_TV: Tensor, kept_TK: Tensor | None) -> Tensor:
    """Logits of the tokens that were kept; nothing else is possible."""
    if kept_TK is None:
        return logits_TV
    return torch.full_like(logits_TV, float("-inf")).scatter_(1, kept_TK, logits_TV.gather(1, kept_TK))


def log_probabilities(logits_TV: Tensor, temperature: float, kept_TK: Tensor | None = None) -> Tensor:
    return within(logits_TV if temperature == 1.0 else logits_TV / temperature, kept_TK).log_softmax(-1)


def chosen(log_TV: Tensor, tokens_T: Tensor, logits_TV: Tensor, temperature: float, kept_TK: Tensor | None) -> Tensor:
    """log p of one token in every row: out of `log_TV`, or by the kernel that chooses the engine's tokens on a GPU. It
    takes logits as the model gave them: in another format it would add in another order."""
    if logits_TV.is_cuda and kept_TK is None:
        from moesaic.kernels.triton.sample import logprobs_of

        return logprobs_of(logits_TV, tokens_T, temperature)
    return log_TV.gather(1, tokens_T.unsqueeze(1)).squeeze(1)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        targets_T: Tensor,
        temperature: float,
        linear: Product,
        kept_TK: Tensor | None,
        rows: int,
    ) -> tuple[Tensor, Tensor]:
        logprobs_T = torch.zeros(len(targets_T), dtype=torch.float32, device=hidden_TD.device)
        entropy_T = torch.zeros_like(logprobs_T)
        for start in range(0, len(targets_T), rows):
            part = slice(start, start + rows)
            among_TK = None if kept_TK is None else kept_TK[part]
            logits_TV = linear(hidden_TD[part], weight_VD)
            log_TV = log_probabilities(logits_TV.float(), temperature, among_TK)
            logprobs_T[part] = chosen(log_TV, targets_T[part], logits_TV, temperature, among_TK)
            entropy_T[part] = -(log_TV.exp() * log_TV.clamp(min=-1e30)).sum(-1)  # what is impossible adds nothing
        ctx.save_for_backward(hidden_TD, weight_VD, targets_T, kept_TK)
        ctx.temperature, ctx.rows = temperature, rows
        ctx.mark_non_differentiable(entropy_T)
        return logprobs_T, entropy_T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden_TD, weight_VD, targets_T, kept_TK = ctx.saved_tensors
        d_hidden_TD = torch.zeros_like(hidden_TD)
        trained = ctx.needs_input_grad[1]
        d_weight_VD = torch.zeros_like(weight_VD, dtype=torch.float32) if trained else None
        d_logprobs_T = grads[0] / ctx.temperature
        for start in range(0, len(targets_T), ctx.rows):
            part = slice(start, start + ctx.rows)
            # The slope of log p(target) is one at the target, less every token's probability.
            among_TK = None if kept_TK is None else kept_TK[part]
            logits_TV = F.linear(hidden_TD[part], weight_VD).float()
            d_logits_TV = -log_probabilities(logits_TV, ctx.temperature, among_TK).exp_()
            target_T1 = targets_T[part].unsqueeze(1)
            d_logits_TV.scatter_add_(1, target_T1, d_logits_TV.new_ones(target_T1.shape))
            d_logits_TV = (d_logits_TV * d_logprobs_T[part].unsqueeze(1)).to(hidden_TD.dtype)
            d_hidden_TD[part] = torch.mm(d_logits_TV, weight_VD)
            if d_weight_VD is not None:
                d_weight_VD += torch.mm(d_logits_TV.t(), hidden_TD[part])
        d_weight_VD = None if d_weight_VD is None else d_weight_VD.to(weight_VD.dtype)
        return d_hidden_TD, d_weight_VD, None, None, None, None, None
