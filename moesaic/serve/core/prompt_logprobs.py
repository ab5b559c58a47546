"""Log-probabilities of a prompt's tokens: in steps so short that others come between, and in slices of bounded memory.

A row whose log-probability is wanted costs the output matrix and a pass over the vocabulary beside its forward, and its
prompt is computed even where it is cached. A long prompt is therefore computed a few rows a step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moesaic.kernels.logprobs import chosen
from moesaic.model.transformer import Model
from moesaic.serve.core.request import Request
from moesaic.serve.core.token_logprobs import token_logprobs

SLICE = 1 << 23  # logits at once
ALONE, BESIDE = 32, 128  # of the tokens of a step, one in so many
# On a GPU, whose steps have thousands of tokens and take no less time with a few hundred.
LARGE, LARGE_ALONE = 2048, 8


def scored_budget(tokens: int, beside_others: bool) -> int:
    """How many rows of a step of so many tokens may be such ones. Alone: so few that a request that comes in the middle
    of a step waits little. Beside others: about as much work as one decode step of theirs, so that it takes twice as
    long as without."""
    alone = LARGE_ALONE if tokens >= LARGE else ALONE
    return max(1, tokens // (BESIDE if beside_others else alone))


def record_logprobs(model: Model, request: Request, hidden_TD: Tensor) -> None:
    """`hidden_TD` are those of its next tokens to be computed, each of which predicts the one after it."""
    request.prompt_logprobs = request.prompt_logprobs or [None]
    after = request.prompt[request.computed + 1 : request.computed + len(hidden_TD) + 1]
    rows = max(1, SLICE // model.config.vocab)
    for start in range(0, len(after), rows):
        tokens = after[start : start + rows]
        logits_RV = model.logits_at(hidden_TD[start : start + len(tokens)])
        log_RV = logits_RV.float().log_softmax(-1)
        tokens_R = torch.tensor(tokens, device=log_RV.device)
        chosen_R = chosen(log_RV, tokens_R, logits_RV, 1.0, None)
        request.prompt_logprobs += token_logprobs(log_RV, tokens, chosen_R, request.sampling.prompt_logprobs)
