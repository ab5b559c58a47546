"""Less for saying the same again: minus the share of n-grams that have been there before, from 0 to -1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from moesaic.align.rewards import Reward
from moesaic.worlds.judges import Answer


@dataclass(frozen=True)
class Repetition(Reward):
    n: int = 4
    free: float = 0.0  # a share that is not punished; ordinary text repeats itself a little
    unit: Literal["words", "characters"] = "words"  # characters for languages that do not part their words

    def __post_init__(self) -> None:
        if self.n < 1 or not 0 <= self.free < 1:
            raise ValueError("n must be at least 1, and free from 0 to below 1")

    def __call__(self, answer: Answer) -> float:
        text = answer.text.casefold()
        items = text.split() if self.unit == "words" else list("".join(text.split()))
        grams = [tuple(items[start : start + self.n]) for start in range(len(items) - self.n + 1)]
        if not grams:
            return 0.0
        repeated = 1 - len(set(grams)) / len(grams)
        return -max(0.0, repeated - self.free) / (1 - self.free)
