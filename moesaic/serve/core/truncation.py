"""From logits to the tokens that may be drawn and their probabilities: temperature and cuts, in the order that a
request's `Sampling.cuts` gives.

Top-k, top-p and min-p after one temperature, which is what nearly everybody asks for, are one function (`truncated`).
The rest is a chain of functions, each of which takes the candidates that the one before has left.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from moesaic.serve.core import mirostat
from moesaic.serve.core.draws import XTC, draw

if TYPE_CHECKING:
    from moesaic.serve.core.request import Request

# Sorting a whole vocabulary is slow; the likeliest this many tokens nearly always hold the mass that top-p asks for.
SORTED = 512


def distribution(logits_V: Tensor, request: Request) -> tuple[Tensor | None, Tensor]:
    """The tokens that may be drawn (None: all) and their probabilities, up to a factor."""
    sampling = request.sampling
    if sampling.usual:
        probs_V = (logits_V / sampling.temperature).softmax(-1)
        return truncated(probs_V, sampling.top_k, sampling.top_p, sampling.min_p)
    left = Candidates(None, logits_V)
    for name in sampling.cuts:
        left = CUTS[name](left, request)
    return left.tokens_A, left.probs_A


def truncated(probs_V: Tensor, top_k: int, top_p: float, min_p: float) -> tuple[Tensor | None, Tensor]:
    """The tokens that may be sampled (None: all) and their probabilities, likeliest first where some were cut."""
    vocab = len(probs_V)
    if not (0 < top_k < vocab) and top_p >= 1.0 and min_p <= 0.0:
        return None, probs_V
    count = min(top_k or vocab, vocab)
    probs_A, tokens_A = probs_V.topk(min(count, SORTED))
    # Top-p is a share of what top-k left, all of which must be known then.
    if count > SORTED and (count < vocab or not _enough(probs_A, top_p, min_p)):
        probs_A, tokens_A = probs_V.topk(count)
    kept = len(probs_A)
    if top_p < 1.0:
        # Of what top-k left, the fewest tokens whose mass reaches top_p.
        mass = probs_A.sum() if count < vocab else 1.0
        kept = int((probs_A.cumsum(0) - probs_A < top_p * mass).sum())
    if min_p > 0.0:
        kept = min(kept, int((probs_A >= min_p * probs_A[0]).sum()))
    return tokens_A[: max(kept, 1)], probs_A[: max(kept, 1)]


def _enough(probs_A: Tensor, top_p: float, min_p: float) -> bool:
    """Whether what is cut off next lies within these likeliest tokens."""
    return bool((top_p < 1.0 and probs_A.sum() >= top_p) or (min_p > 0.0 and probs_A[-1] < min_p * probs_A[0]))


# The chain


class Candidates(NamedTuple):
    """Tokens that may still be drawn (None: all), and their logits. A token that was masked has minus infinity."""

    tokens_A: Tensor | None
    logits_A: Tensor

    @property
    def probs_A(self) -> Tensor:
        return self.logits_A.softmax(-1)

    def keep(self, places_A: Tensor) -> Candidates:
        """Some of them, by a mask or by their places."""
        if self.tokens_A is None:
            tokens_A = places_A.nonzero()[:, 0] if places_A.dtype == torch.bool else places_A
            return Candidates(tokens_A, self.logits_A[places_A])
        return Candidates(self.tokens_A[places_A], self.logits_A[places_A])


def top_k(left: Candidates, request: Request) -> Candidates:
    count = request.sampling.top_k
    return left if count >= len(left.logits_A) else left.keep(left.logits_A.topk(count).indices)


def top_p(left: Candidates, request: Request) -> Candidates:
    places_A, _ = truncated(left.probs_A, 0, request.sampling.top_p, 0.0)
    return left if places_A is None else left.keep(places_A)


def min_p(left: Candidates, request: Request) -> Candidates:
    """Those at least `min_p` times as likely as the likeliest."""
    probs_A = left.probs_A
    return left.keep(probs_A >= request.sampling.min_p * probs_A.max())


def top_n_sigma(left: Candidates, request: Request) -> Candidates:
    """Those whose logit is at most `top_n_sigma` standard deviations of the logits below the largest."""
    known_A = left.logits_A[left.logits_A > float("-inf")]
    if len(known_A) < 2:
        return left
    return left.keep(left.logits_A >= known_A.max() - request.sampling.top_n_sigma * known_A.std(correction=0))


def typical_p(left: Candidates, request: Request) -> Candidates:
    """Locally typical sampling (Meister et al., 2023): the tokens whose information is nearest to the entropy, as many
    as hold the mass."""
    mass, log_A = request.sampling.typical_p, left.logits_A.log_softmax(-1)
    probs_A = log_A.exp()
    entropy = -(probs_A * log_A).nansum()  # a token that was masked adds nothing
    away_A = (-log_A - entropy).abs()
    places_A = away_A.topk(min(SORTED, len(away_A)), largest=False).indices
    if probs_A[places_A].sum() <= mass:
        places_A = away_A.argsort()
    kept = int((probs_A[places_A].cumsum(0) <= mass).sum()) + 1
    return left.keep(places_A[:kept])


def xtc(left: Candidates, request: Request) -> Candidates:
    """Exclude top choices (p-e-w, 2024): now and then only the least likely of all tokens above a threshold stays."""
    sampling = request.sampling
    if draw(request.seed, len(request.tokens), XTC) >= sampling.xtc_probability:
        return left
    probs_A = left.probs_A
    above_A = (probs_A >= sampling.xtc_threshold) & (probs_A > 0.0)  # one that was masked is no choice
    if int(above_A.sum()) < 2:
        return left
    kept_A = ~above_A
    kept_A[probs_A.masked_fill(kept_A, float("inf")).argmin()] = True
    if left.tokens_A is None and not sampling.record_draws:  # few are left out: to gather the others takes longer
        return Candidates(None, left.logits_A.masked_fill(~kept_A, float("-inf")))
    return left.keep(kept_A)


def temperature(left: Candidates, request: Request) -> Candidates:
    """One for all tokens; or with a range, by how sure the model is: from the lowest where it is certain to the highest
    where all candidates are alike."""
    sampling = request.sampling
    value = sampling.temperature
    if sampling.dynatemp_range > 0.0:
        count = int((left.logits_A > float("-inf")).sum())
        if count < 2:
            return left
        log_A = left.logits_A.log_softmax(-1)
        entropy = float(-(log_A.exp() * log_A).nansum()) / math.log(count)
        least, most = max(0.0, value - sampling.dynatemp_range), value + sampling.dynatemp_range
        value = least + (most - least) * max(0.0, entropy) ** sampling.dynatemp_exponent
    if value <= LEAST_TEMPERATURE:
        return left.keep(left.logits_A.argmax()[None])
    return left._replace(logits_A=left.logits_A / value)


LEAST_TEMPERATURE = 1e-6  # below it, only the likeliest token is left


def by_mirostat(left: Candidates, request: Request) -> Candidates:
    return left.keep(mirostat.kept(left.probs_A, request))


CUTS: dict[str, Callable[[Candidates, Request], Candidates]] = {
    "temperature": temperature,
    "top_n_sigma": top_n_sigma,
    "top_k": top_k,
    "typ_p": typical_p,
    "top_p": top_p,
    "min_p": min_p,
    "xtc": xtc,
    "mirostat": by_mirostat,
}
