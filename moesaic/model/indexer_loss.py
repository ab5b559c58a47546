"""What DSA's indexers learn from (DeepSeek-V3.2, GLM-5): the Kullback-Leibler divergence of what an indexer would look
at, the softmax of its scores, from what attention looks at, its weights summed over heads and normalised.

In a warm-up attention is dense, and all earlier tokens count; in sparse training those that are selected. An indexer
that serves several layers learns from each of them, which has the gradient of their mean (IndexCache).
"""

from __future__ import annotations

import torch
from torch import Tensor

from moesaic.kernels.interface import LatentCall, mask_of
from moesaic.kernels.latent_attention import expanded, normed_and_rotated
from moesaic.kernels.reference import visible_TM
from moesaic.model.context import ForwardContext


def note_indexer_loss(call: LatentCall, context: ForwardContext) -> None:
    """Add what the indexer that served this call lost, in nats a token, to what the forward notes."""
    if context.index_scores is None or context.routing is None:  # layer dropping left its layer out
        return
    number, scores = context.index_scores
    losses = [
        divergence(scores_TM, attended_TM, seen_TM)
        for scores_TM, (attended_TM, seen_TM) in zip(scores, attention_weights(call, context), strict=True)
    ]
    loss = torch.cat(losses).mean() if losses else call.q_THC.new_zeros(())
    context.routing.indexer_losses.setdefault(number, []).append(loss)


def divergence(scores_TM: Tensor, attended_TM: Tensor, seen_TM: Tensor) -> Tensor:
    """Of each query."""
    hidden_TM = ~seen_TM
    log_q_TM = scores_TM.masked_fill(hidden_TM, float("-inf")).log_softmax(-1).masked_fill(hidden_TM, 0.0)
    return (torch.xlogy(attended_TM, attended_TM) - attended_TM * log_q_TM).sum(-1)


@torch.no_grad()
def attention_weights(call: LatentCall, context: ForwardContext) -> list[tuple[Tensor, Tensor]]:
    """How much of its attention each of a sequence's tokens gives to every other, the mean over heads, in float32; and
    which it may see."""
    assert call.attention.cache is None, "indexers learn in training only"
    q_THC, latent_TX = normed_and_rotated(call, context.ops.rms_norm, context.ops.rotate)
    found = []
    for span, q, latent_MX in context.layout.per_sequence(q_THC, latent_TX):
        k_MHC, _ = expanded(call, latent_MX)
        seen_TM = visible_TM(span.new, span.total, None, q.device)
        chosen_TK = call.selected[span.number] if call.selected is not None else None
        if chosen_TK is not None:
            seen_TM = seen_TM & mask_of(chosen_TK, span.total)
        sum_TM = torch.zeros_like(seen_TM, dtype=torch.float32)
        for head in range(q.shape[1]):  # one at a time: all of them are heads times as much memory
            scores_TM = (q[:, head] @ k_MHC[:, head].T).float() * call.attention.scale
            sum_TM += scores_TM.masked_fill(~seen_TM, float("-inf")).softmax(-1)
        found.append((sum_TM / q.shape[1], seen_TM))
    return found
