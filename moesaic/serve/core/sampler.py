"""Logits to tokens, by each request's own sampling params: process (`processors.py`), cut (`truncation.py`), draw.

The random number for the n-th token of a request is a hash of its seed and n, not the state of a generator: a request
gives the same text in any batch, after a preemption, and with or without speculative decoding.
"""

from __future__ import annotations

from collections.abc import Set

import torch
from torch import Tensor

from moesaic.kernels.logprobs import chosen as logprob_of
from moesaic.kernels.logprobs import log_probabilities
from moesaic.serve.core import mirostat
from moesaic.serve.core.draws import draw
from moesaic.serve.core.processors import processed
from moesaic.serve.core.request import Request, TokenLogprob
from moesaic.serve.core.sampling import Sampling
from moesaic.serve.core.token_logprobs import token_logprobs
from moesaic.serve.core.truncation import distribution


class Sampler:
    """Samples from the logits of one forward; what can be is computed for all its rows at once."""

    def __init__(self, logits_RV: Tensor) -> None:
        self.given_RV, self.logits_RV = logits_RV, logits_RV.float()
        self.log_RV = self.logits_RV.log_softmax(-1)
        self.best_R: list[int] = self.logits_RV.argmax(-1).tolist()

    def sample(self, row: int, request: Request, stop_tokens: Set[int]) -> TokenLogprob:
        """The next token of a request, given its tokens so far."""
        sampling = request.sampling
        if sampling.plain:
            return self._recorded(row, self.report(row, self.best_R[row], sampling), sampling, None)
        logits_V = processed(self.logits_RV[row].clone(), request, stop_tokens)
        if sampling.temperature == 0.0:
            token, kept_A, drawn = int(logits_V.argmax()), None, None
        else:
            token, kept_A, drawn = self._draw(logits_V, request)
        log_V = logits_V.log_softmax(-1) if sampling.processed_logprobs else None
        chosen = self.report(row, token, sampling, log_V)
        if sampling.mirostat:
            mirostat.follow(request, [drawn])
            return chosen._replace(drawn=drawn)
        return self._recorded(row, chosen, sampling, kept_A)

    def report(self, row: int, token: int, sampling: Sampling, log_V: Tensor | None = None) -> TokenLogprob:
        """A token's log-probability and the likeliest tokens in its place: the model's own, unless others are given."""
        log_1V = self.log_RV[row : row + 1] if log_V is None else log_V[None]
        logprob = self._logprob(log_1V, row, token) if log_V is None else float(log_V[token])
        if not sampling.logprobs and not sampling.logprob_tokens:
            return TokenLogprob(token, logprob)
        chosen_1 = torch.tensor([logprob])
        return token_logprobs(log_1V, [token], chosen_1, sampling.logprobs, sampling.logprob_tokens)[0]

    def _draw(self, logits_V: Tensor, request: Request) -> tuple[int, Tensor | None, float | None]:
        """A token, what it was drawn from (None: all tokens), and with which log-probability where that is needed."""
        kept_A, probs_A = distribution(logits_V, request)
        below_A = probs_A.double().cumsum(0)
        place = torch.searchsorted(below_A, below_A[-1] * draw(request.seed, len(request.tokens)), right=True)
        chosen = min(int(place), len(probs_A) - 1)
        drawn = float((probs_A[chosen].double() / below_A[-1]).log()) if request.sampling.mirostat else None
        return int(kept_A[chosen]) if kept_A is not None else chosen, kept_A, drawn

    def _recorded(self, row: int, chosen: TokenLogprob, sampling: Sampling, kept_A: Tensor | None) -> TokenLogprob:
        """With `record_draws`, by the same arithmetic as `kernels.logprobs`, so that a trainer finds the same bits."""
        if not sampling.record_draws:
            return chosen
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
