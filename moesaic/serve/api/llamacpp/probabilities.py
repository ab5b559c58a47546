"""`completion_probabilities`: the likeliest tokens beside each sampled one, as the model has them (log-probabilities),
or as they were drawn from (`post_sampling_probs`)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from moesaic.errors import UserError
from moesaic.serve.api.logprobs import TokenDecoder, finite
from moesaic.serve.core.request import TokenLogprob
from moesaic.serve.core.sampling import Sampling

MOST = 100  # likeliest tokens that the engine reports


def as_logprobs(decoder: TokenDecoder, chosen: TokenLogprob, count: int) -> dict[str, Any]:
    top = [_entry(decoder, token, "logprob", finite(logprob)) for token, logprob in chosen.top[:count]]
    return {**_entry(decoder, chosen.token, "logprob", finite(chosen.logprob)), "top_logprobs": top}


def as_probs(decoder: TokenDecoder, chosen: TokenLogprob, count: int, sampling: Sampling) -> dict[str, Any]:
    probs = drawn_from(chosen, sampling)
    order = sorted(probs, key=lambda token: -probs[token])[:count]
    top = [_entry(decoder, token, "prob", probs[token]) for token in order if probs[token] > 0.0]
    return {**_entry(decoder, chosen.token, "prob", probs[chosen.token]), "top_probs": top}


def recordable(sampling: Sampling) -> dict[str, Any]:
    """Sampling params that make the engine report what `drawn_from` needs; refused where it cannot be told.

    It reports the draw's own probability from the model's logits. What penalties, a bias or a grammar made of them it
    reports for so many of the likeliest tokens, which must then be all there are."""
    if sampling.temperature and sampling.changes_logits and not 0 < sampling.top_k <= MOST:
        problem = "with penalties, a bias or a grammar it can be told of few tokens only"
        raise UserError("post_sampling_probs", problem, f"Give a top_k of at most {MOST}.")
    more = {"logprobs": MOST, "processed_logprobs": True} if sampling.changes_logits else {}
    return {"record_draws": True, **more}


def drawn_from(chosen: TokenLogprob, sampling: Sampling) -> Mapping[int, float]:
    """The probabilities with which the likeliest tokens could have been drawn, and the one that was."""
    if not sampling.temperature:
        return {chosen.token: 1.0}
    logprobs = dict(chosen.top) | {chosen.token: chosen.logprob}
    kept = set(chosen.kept) if chosen.kept is not None else logprobs.keys()
    scaled = {token: logprobs[token] / sampling.temperature for token in logprobs.keys() & kept}
    if sampling.changes_logits:
        total = _log_sum(scaled.values())
    else:
        assert chosen.drawn is not None
        total = scaled[chosen.token] - chosen.drawn
    return {token: min(1.0, math.exp(logit - total)) for token, logit in scaled.items()}


def _log_sum(logits: Iterable[float]) -> float:
    some = list(logits)
    most = max(some)
    return most + math.log(sum(math.exp(logit - most) for logit in some))


def _entry(decoder: TokenDecoder, token: int, name: str, value: float) -> dict[str, Any]:
    raw = decoder.bytes_of(token)
    return {"id": token, "token": raw.decode("utf-8", "ignore"), "bytes": list(raw), name: value}
