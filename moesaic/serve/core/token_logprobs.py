"""What is reported of tokens: their log-probabilities, their ranks, and the likeliest tokens in their places, or given
ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moesaic.serve.core.request import TokenLogprob


def token_logprobs(
    log_RV: Tensor, tokens: Sequence[int], chosen_R: Tensor, top: int | None, instead: Sequence[int] = ()
) -> list[TokenLogprob]:
    """Of one token in every row, whose log-probability is in `chosen_R`, with the `top` likeliest (-1: all) or those
    given `instead`. One top-k over all rows."""
    vocab, device = log_RV.shape[1], log_RV.device
    if instead:
        ids_RK = torch.tensor(instead, device=device).expand(len(tokens), -1)
        values_RK = log_RV.gather(1, ids_RK)
    else:
        values_RK, ids_RK = log_RV.topk(vocab if top == -1 else min(top or 0, vocab))
    # Ties count against a token, as in vLLM; one among the likeliest has the rank of its place there.
    ranks_R = (log_RV >= log_RV.gather(1, torch.tensor(tokens, device=device).unsqueeze(1))).sum(1)
    found = []
    for token, logprob, ids, values, rank in zip(
        tokens, chosen_R.tolist(), ids_RK.tolist(), values_RK.tolist(), ranks_R.tolist(), strict=True
    ):
        place = ids.index(token) + 1 if not instead and token in ids else rank
        found.append(TokenLogprob(token, logprob, tuple(zip(ids, values)), rank=place))
    return found
