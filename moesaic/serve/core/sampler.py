"""Logits to tokens, by each request's own sampling params.

The random number for the n-th token of a request is a hash of its seed and n, not the state of a generator: a request
gives the same text in any batch, after a preemption, and with or without speculative decoding.
"""

from __future__ import annotations

import hashlib
import struct
from collections import Counter

import torch
from torch import Tensor

from moesaic.kernels.logprobs import chosen as logprob_of
from moesaic.kernels.logprobs import log_probabilities
from moesaic.serve.core.request import Request, Sampling, TokenLogprob

# Sorting a whole vocabulary is slow; the likeliest this many tokens nearly always hold the mass that top-p asks for.
SORTED = 512


def draw(seed: int, place: int) -> float:
    """A number in [0, 1) that is fixed by seed and place."""
    digest = hashlib.blake2b(struct.pack("<qq", seed, place), digest_size=8).digest()
    return float((int.from_bytes(digest, "little") >> 11) / 2**53)


class Sampler:
    """Samples from the logits of one forward; what can be is computed for all its rows at once."""

    def __init__(self, logits_RV: Tensor) -> None:
        self.given_RV, self.logits_RV = logits_RV, logits_RV.float()
        self.log_RV = self.logits_RV.log_softmax(-1)
        self.best_R: list[int] = self.logits_RV.argmax(-1).tolist()

    def sample(self, row: int, request: Request, stop_tokens: set[int]) -> TokenLogprob:
        """The next token of a request, given its tokens so far."""
        if request.sampling.plain:
            token, kept_A = self.best_R[row], None
        else:
            token, kept_A = self._sample(self.logits_RV[row], request, stop_tokens)
        chosen = self.report(row, token, request.sampling.logprobs)
        return self._draw(row, chosen, request.sampling, kept_A) if request.sampling.record_draws else chosen

    def report(self, row: int, token: int, top: int | None) -> TokenLogprob:
        logprob = self._logprob(self.log_RV[row : row + 1], row, token)
        if not top:
            return TokenLogprob(token, logprob)
        values, indices = self.log_RV[row].topk(min(top, self.log_RV.shape[1]))
        return TokenLogprob(token, logprob, tuple(zip(indices.tolist(), values.tolist())))

    def _draw(self, row: int, chosen: TokenLogprob, sampling: Sampling, kept_A: Tensor | None) -> TokenLogprob:
        """The same arithmetic as `kernels.logprobs`, so that a trainer finds the same bits."""
        kept_1A, temperature = None if kept_A is None else kept_A[None], sampling.temperature or 1.0
        log_1V = log_probabilities(self.logits_RV[row : row + 1], temperature, kept_1A)
        drawn = self._logprob(log_1V, row, chosen.token, temperature, kept_1A)
        return chosen._replace(drawn=drawn, kept=None if kept_A is None else tuple(kept_A.tolist()))

    def _logprob(
        self, log_1V: Tensor, row: int, token: int, temperature: float = 1.0, kept_1A: Tensor | None = None
    ) -> float:
        if not log_1V.is_cuda:
            return float(log_1V[0, token])
        token_1 = torch.tensor([token], device=log_1V.device)
        return float(logprob_of(log_1V, token_1, self.given_RV[row : row + 1], temperature, kept_1A))

    def _sample(self, logits_V: Tensor, request: Request, stop_tokens: set[int]) -> tuple[int, Tensor | None]:
        sampling = request.sampling
        logits_V = penalized(logits_V.clone(), request)
        if request.written < sampling.min_tokens and (ends := stop_tokens | sampling.stop_tokens):
            logits_V[sorted(ends)] = float("-inf")
        if request.matcher is not None:
            logits_V = request.matcher.mask(logits_V)
        if sampling.temperature == 0.0:
            return int(logits_V.argmax()), None
        probs_V = (logits_V / sampling.temperature).softmax(-1)
        kept_A, probs_A = truncated(probs_V, sampling.top_k, sampling.top_p, sampling.min_p)
        below_A = probs_A.double().cumsum(0)
        place = torch.searchsorted(below_A, below_A[-1] * draw(request.seed, len(request.tokens)), right=True)
        chosen = min(int(place), len(probs_A) - 1)
        return int(kept_A[chosen]) if kept_A is not None else chosen, kept_A


def penalized(logits_V: Tensor, request: Request) -> Tensor:
    """Bias and penalties, in place."""
    sampling, device = request.sampling, logits_V.device
    if sampling.repetition_penalty != 1.0:
        present = torch.tensor(sorted(set(request.tokens)), device=device)
        values = logits_V[present]
        factor = sampling.repetition_penalty
        logits_V[present] = torch.where(values > 0, values / factor, values * factor)
    if sampling.presence_penalty or sampling.frequency_penalty:
        counts = Counter(request.tokens[len(request.prompt) :])
        if counts:
            tokens = torch.tensor(list(counts), device=device)
            times = torch.tensor(list(counts.values()), dtype=torch.float32, device=device)
            logits_V[tokens] -= sampling.presence_penalty + sampling.frequency_penalty * times
    if sampling.logit_bias:
        tokens = torch.tensor(list(sampling.logit_bias), device=device)
        logits_V[tokens] += torch.tensor(list(sampling.logit_bias.values()), device=device)
    return logits_V


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
