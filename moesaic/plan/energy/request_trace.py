"""Requests as they arrive at a service: a synthetic trace, bursty and with the swing of a day, the same for one seed.

Gaps between requests are Gamma distributed (a coefficient of variation above 1 makes bursts); the rate swings like a
sine around its mean; lengths are log-normal with the means of ShareGPT (vLLM, arXiv 2309.06180: 161 and 338 tokens).
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import NamedTuple

from moesaic.errors import UserError


class Request(NamedTuple):
    arrival: float
    prompt: int
    output: int


@dataclass(frozen=True)
class Traffic:
    """What arrives in `seconds`. `rate`: requests per second on average."""

    seconds: float
    rate: float
    burstiness: float = 2.0  # standard deviation of the gaps over their mean; 1: Poisson
    swing: float = 0.6  # of the rate around its mean, 0 to 1
    period: float | None = None  # of the swing; None: one in the whole trace, a day in small
    prompt: float = 161.0
    output: float = 338.0
    longest_prompt: int = 4096
    longest_output: int = 2048
    seed: int = 0


PROMPT_SPREAD, OUTPUT_SPREAD = 1.1, 0.9  # standard deviation of the logarithm


def synthetic_trace(traffic: Traffic) -> list[Request]:
    _check(traffic)
    draw = random.Random(traffic.seed)
    shape = 1 / traffic.burstiness**2
    requests: list[Request] = []
    passed = 0.0  # expected number of requests until now: time, stretched so that the rate in it is 1
    while True:
        passed += draw.gammavariate(shape, 1 / shape)
        arrival = _time_of(passed, traffic)
        if arrival >= traffic.seconds:
            return requests
        prompt = _length(draw, traffic.prompt, PROMPT_SPREAD, traffic.longest_prompt)
        requests.append(Request(arrival, prompt, _length(draw, traffic.output, OUTPUT_SPREAD, traffic.longest_output)))


def _length(draw: random.Random, mean: float, spread: float, longest: int) -> int:
    value = draw.lognormvariate(math.log(mean) - spread**2 / 2, spread)
    return max(1, min(longest, round(value)))


def _expected(time: float, traffic: Traffic) -> float:
    """Requests expected until `time`: the integral of the rate, which is lowest at the start of the trace."""
    turn = 2 * math.pi / (traffic.period or traffic.seconds)
    return traffic.rate * (time - traffic.swing * math.sin(turn * time) / turn)


def _time_of(expected: float, traffic: Traffic) -> float:
    low, high = 0.0, traffic.seconds * 2 + expected / traffic.rate * 2
    for _ in range(60):
        middle = (low + high) / 2
        if _expected(middle, traffic) < expected:
            low = middle
        else:
            high = middle
    return high


def _check(traffic: Traffic) -> None:
    for name in ("seconds", "rate", "burstiness", "prompt", "output"):
        if not 0 < getattr(traffic, name) < 1e9:
            raise UserError(f"traffic: {name}", f"must be above zero, not {getattr(traffic, name)}")
    if not 0 <= traffic.swing <= 1:
        raise UserError("traffic: swing", f"must be between 0 and 1, not {traffic.swing}")
