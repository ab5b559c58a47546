"""Perplexity of a sequence of tokens, read in windows: how many tokens the model hesitates between, on average."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moesaic.model.transformer import Model

Progress = Callable[[int, int], None]  # tokens that are read, and all of them


@dataclass(frozen=True)
class Result:
    nats: float  # in all
    predicted: int

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.nats / self.predicted, 700.0))


def perplexity(
    model: Model,
    tokens: Sequence[int],
    window: int,
    stride: int,
    progress: Progress = lambda done, total: None,
) -> Result:
    """Each next window starts `stride` tokens further, and only tokens that no window before has predicted count."""
    nats, predicted, known = 0.0, 0, 0
    for start in range(0, len(tokens), stride):
        piece = tokens[start : start + window]
        if start + len(piece) <= max(known, start + 1):
            break
        (logprobs,) = model.logprobs([piece])
        fresh = logprobs[max(known - start - 1, 0) :]
        nats -= float(fresh.double().sum())
        predicted += len(fresh)
        known = start + len(piece)
        progress(known, len(tokens))
        if known >= len(tokens):
            break
    return Result(nats, predicted)
