"""Mirostat (Basu et al., 2021): tokens are cut so that the surprise of those drawn stays near a target `tau`, in bits.

`mu`, how much surprise is let through, follows what was drawn: it is the one piece of sampling that is no function of
the tokens alone. But it is one of the log-probabilities with which they were drawn, and these go with the tokens
wherever a request goes: `follow` brings `mu` up to date from them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from moesaic.serve.core.request import Request

LIKELIEST = 100  # tokens by which version 1 estimates how steep a distribution is


def kept(probs_A: Tensor, request: Request) -> Tensor:
    """Which of some tokens may be drawn: a mask, or their places."""
    mu = request.mu if request.mu is not None else 2.0 * request.sampling.mirostat_tau
    if request.sampling.mirostat == 1:
        return probs_A.topk(min(count_for(probs_A, mu), len(probs_A))).indices
    kept_A = -probs_A.log2() <= mu
    kept_A[probs_A.argmax()] = True
    return kept_A


def count_for(probs_A: Tensor, mu: float) -> int:
    """Version 1: how many of the likeliest tokens have the surprise `mu`, if probabilities fall as Zipf says."""
    probs_M = probs_A.topk(min(LIKELIEST, len(probs_A))).values.double()
    probs_M = probs_M[probs_M > 0.0]
    if len(probs_M) < 2:
        return 1
    ranks_M = torch.arange(1, len(probs_M) + 1, dtype=torch.float64, device=probs_M.device)
    steps = (ranks_M[1:] / ranks_M[:-1]).log()
    falls = (probs_M[:-1] / probs_M[1:]).log()
    steepness = float((steps * falls).sum() / (steps * steps).sum())
    # Powers as logarithms: for a steep or a flat distribution they leave what a float can hold.
    excess = steepness - 1.0
    vocab = len(probs_A)
    if abs(excess) < 1e-9:
        ratio = 1.0 / math.log(vocab) if vocab > 1 else 1.0  # the limit
    else:
        ratio = excess / -math.expm1(max(-700.0, min(700.0, -excess * math.log(vocab))))
    log_count = (mu * math.log(2.0) + math.log(max(ratio, 1e-300))) / max(steepness, 1e-9)
    return max(1, int(math.exp(min(log_count, math.log(vocab)))))


def follow(request: Request, drawn: Iterable[float | None]) -> None:
    """Bring `mu` up to date with tokens that were drawn with these log-probabilities."""
    sampling = request.sampling
    for logprob in drawn:
        if sampling.mirostat and logprob is not None:
            mu = request.mu if request.mu is not None else 2.0 * sampling.mirostat_tau
            request.mu = mu - sampling.mirostat_eta * (-logprob / math.log(2.0) - sampling.mirostat_tau)
