"""How long a request took, as llama.cpp's `timings` say it.

Prompt time is from a request's arrival to its first token, so waiting for its turn is part of it; the time of generated
tokens is from the first to the last."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel

from moesaic.serve.core.request import Request


class Timings(BaseModel):
    cache_n: int  # tokens of the prompt that were cached
    prompt_n: int  # those that were computed
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float


def timings(requests: Sequence[Request], prompts: int = 1, discarded: int = 0) -> Timings:
    """Of requests that were sent together: the completions of each prompt after one another, of which the prompt is
    counted once. `discarded` tokens of each were generated and not sent."""
    first = requests[:: max(1, len(requests) // prompts)]
    cached = sum(request.cached for request in first)
    computed = sum(len(request.prompt) for request in first) - cached
    generated = sum(max(0, request.written - discarded) for request in requests)
    arrived = min(request.arrived for request in requests)
    began = min((one.first_token for one in requests if one.first_token is not None), default=arrived)
    ended = max((one.last_token for one in requests if one.last_token is not None), default=began)
    prompt_ms, predicted_ms = 1000 * max(0.0, began - arrived), 1000 * max(0.0, ended - began)
    after_first = max(0, generated - len(requests))
    return Timings(
        cache_n=cached,
        prompt_n=computed,
        prompt_ms=prompt_ms,
        prompt_per_token_ms=_share(prompt_ms, computed),
        prompt_per_second=_share(1000 * computed, prompt_ms),
        predicted_n=generated,
        predicted_ms=predicted_ms,
        predicted_per_token_ms=_share(predicted_ms, after_first),
        predicted_per_second=_share(1000 * after_first, predicted_ms),
    )


def _share(of: float, among: float) -> float:
    return of / among if among else 0.0
