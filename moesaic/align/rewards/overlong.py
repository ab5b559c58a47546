"""DAPO's soft overlong punishment: nothing up to a length, then a line down to -1 at the limit."""

from __future__ import annotations

from dataclasses import dataclass

from moesaic.align.rewards import Reward
from moesaic.worlds.judges import Answer


@dataclass(frozen=True)
class Overlong(Reward):
    limit: int  # tokens, at which the punishment is whole
    cache: int | None = None  # over the last so many it grows; a fifth of the limit, as in the paper

    def __post_init__(self) -> None:
        if self.limit < 1 or (self.cache is not None and not 0 < self.cache <= self.limit):
            raise ValueError("limit must be at least 1, and cache between 1 and limit")

    def __call__(self, answer: Answer) -> float:
        cache = self.cache if self.cache is not None else max(1, self.limit // 5)
        free = self.limit - cache
        return -min(1.0, max(0, answer.tokens - free) / cache)
