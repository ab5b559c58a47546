"""What is done to logits before anything is cut or drawn, in this order: bias, penalties, DRY; then masks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Set
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moesaic.serve.core.bad_words import forbidden
from moesaic.serve.core.dry import subtract_dry

if TYPE_CHECKING:
    from moesaic.serve.core.request import Request

NEVER = float("-inf")


def processed(logits_V: Tensor, request: Request, stop_tokens: Set[int]) -> Tensor:
    """The logits of a request's next token, which may be changed in place."""
    sampling = request.sampling
    if not sampling.changes_logits:
        return logits_V
    return masked(penalized(logits_V, request), request, stop_tokens)


def penalized(logits_V: Tensor, request: Request) -> Tensor:
    """Bias, penalties and DRY, in place."""
    sampling, device = request.sampling, logits_V.device
    if biases := {token: bias for token, bias in sampling.logit_bias.items() if bias > NEVER}:
        logits_V[torch.tensor(list(biases), device=device)] += torch.tensor(list(biases.values()), device=device)
    if sampling.penalizes:
        _penalize(logits_V, request)
    if sampling.dry_multiplier:
        subtract_dry(logits_V, request.tokens, sampling, request.breakers or {})
    return logits_V


def _penalize(logits_V: Tensor, request: Request) -> None:
    """Over the prompt and the completion (repetition) or the completion alone (presence, frequency); with
    `repeat_last_n`, all of them over the last tokens of both."""
    sampling, device = request.sampling, logits_V.device
    seen, counted = request.tokens, request.tokens[len(request.prompt) :]
    if sampling.repeat_last_n is not None:
        seen = counted = request.tokens[-sampling.repeat_last_n :] if sampling.repeat_last_n > 0 else request.tokens
    if sampling.repetition_penalty != 1.0:
        present = torch.tensor(sorted(set(seen)), device=device)
        values = logits_V[present]
        factor = sampling.repetition_penalty
        logits_V[present] = torch.where(values > 0, values / factor, values * factor)
    if (sampling.presence_penalty or sampling.frequency_penalty) and (counts := Counter(counted)):
        tokens = torch.tensor(list(counts), device=device)
        times = torch.tensor(list(counts.values()), dtype=torch.float32, device=device)
        logits_V[tokens] -= sampling.presence_penalty + sampling.frequency_penalty * times


def masked(logits_V: Tensor, request: Request, stop_tokens: Set[int]) -> Tensor:
    """Minus infinity for what must not come. Where that would leave nothing, whatever comes first in this order has its
    way: a grammar, the tokens that are allowed, those that are not, words, the least number of tokens."""
    sampling = request.sampling
    if request.matcher is not None:
        logits_V = request.matcher.mask(logits_V)
    if (allowed_T := sampling.allowed_T) is not None:
        others_V = torch.ones(len(logits_V), dtype=torch.bool)
        others_V[allowed_T] = False
        logits_V = _without(logits_V, others_V.to(logits_V.device))
    if never := [token for token, bias in sampling.logit_bias.items() if bias == NEVER]:
        logits_V = _without(logits_V, torch.tensor(never, device=logits_V.device))
    if sampling.bad_words and (last := forbidden(sampling.bad_words, request.tokens[len(request.prompt) :])):
        logits_V = _without(logits_V, torch.tensor(last, device=logits_V.device))
    if request.written < sampling.min_tokens and (ends := stop_tokens | sampling.stop_tokens):
        logits_V = _without(logits_V, torch.tensor(sorted(ends), device=logits_V.device))
    return logits_V


def _without(logits_V: Tensor, tokens: Tensor) -> Tensor:
    """Without some tokens, unless no other is left."""
    others_V = logits_V.clone()
    others_V[tokens] = NEVER
    return others_V if others_V.max() > NEVER else logits_V
