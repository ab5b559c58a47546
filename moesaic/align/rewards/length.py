"""Full marks between two lengths, and less the further outside of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from moesaic.align.rewards import Reward
from moesaic.worlds.judges import Answer


@dataclass(frozen=True)
class Length(Reward):
    min_length: int = 0
    max_length: int | None = None
    slack: int = 0  # over so many more or fewer the reward falls from 1 to 0
    unit: Literal["tokens", "words", "characters"] = "tokens"

    def __post_init__(self) -> None:
        if self.min_length < 0 or self.slack < 0 or (self.max_length is not None and self.max_length < self.min_length):
            raise ValueError("lengths must be 0 <= min_length <= max_length, and slack at least 0")

    def __call__(self, answer: Answer) -> float:
        length = length_of(answer, self.unit)
        outside = max(self.min_length - length, 0 if self.max_length is None else length - self.max_length, 0)
        return max(0.0, 1.0 - outside / self.slack) if self.slack else float(outside == 0)


def length_of(answer: Answer, unit: str) -> int:
    if unit == "tokens":
        return answer.tokens
    return len(answer.text.split()) if unit == "words" else len(answer.text)
