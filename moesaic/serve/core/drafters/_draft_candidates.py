"""Which tokens a model will probably choose next, judged by the logits of a smaller one.

Greedily, the likeliest. Where the model draws, its draw is known beforehand, being a hash of seed and position: a token
lies where the draw falls into the cumulated probabilities. Those of the smaller model differ a little, so that the
tokens around that point are candidates as well, each with the share of the neighbourhood it covers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moesaic.serve.core.draws import draw
from moesaic.serve.core.processors import processed
from moesaic.serve.core.request import Request
from moesaic.serve.core.truncation import distribution

NEAR = 0.1  # of the probability mass on both sides of a draw
EXACT = 0.5  # confidence of the token that is drawn, before its share of the neighbourhood

Candidates = list[tuple[int, float]]  # tokens, and how likely each is the model's choice


def likely_tokens(
    logits_RV: Tensor, paths: Sequence[tuple[Request, list[int]]], stop_tokens: frozenset[int], most: int
) -> list[Candidates]:
    """For every row: of a request, and the draft tokens that come after its own."""
    logits_RV = logits_RV.float()
    most = min(most, logits_RV.shape[1])
    best_RA = logits_RV.softmax(-1).topk(most)
    values, tokens = best_RA.values.tolist(), best_RA.indices.tolist()
    found = []
    for row, (request, path) in enumerate(paths):
        if request.sampling.plain:
            found.append(list(zip(tokens[row], values[row])))
            continue
        known = request.tokens
        request.tokens = [*known, *path]
        found.append(_likely(logits_RV[row].clone(), request, stop_tokens, most))
        request.tokens = known
    return found


def _likely(logits_V: Tensor, request: Request, stop_tokens: frozenset[int], most: int) -> Candidates:
    sampling = request.sampling
    logits_V = processed(logits_V, request, stop_tokens)
    if sampling.temperature == 0.0:
        values, tokens = logits_V.softmax(-1).topk(most)
        return list(zip(tokens.tolist(), values.tolist()))
    kept_A, probs_A = distribution(logits_V, request)
    above_A = probs_A.double().cumsum(0)
    total = float(above_A[-1])
    point = total * draw(request.seed, len(request.tokens))
    start, end = max(0.0, point - NEAR * total), min(total, point + NEAR * total)
    below_A = above_A - probs_A.double()
    share_A = (above_A.clamp(max=end) - below_A.clamp(min=start)).clamp(min=0.0) / (end - start) * (1 - EXACT)
    drawn = min(int(torch.searchsorted(above_A, point, right=True)), len(probs_A) - 1)
    share_A[drawn] += EXACT
    shares, places = share_A.topk(min(most, len(probs_A)))
    tokens_A = kept_A[places] if kept_A is not None else places
    return [(token, share) for token, share in zip(tokens_A.tolist(), shares.tolist()) if share > 0]
