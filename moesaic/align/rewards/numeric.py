"""Right if the last number in the answer is the right one, within a tolerance."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from moesaic.align.rewards import Reward, without_truth
from moesaic.worlds.example import Example
from moesaic.worlds.judges import Answer
from moesaic.worlds.judges.answer_part import Part, part_of, truths

# 1,234.5 or 12 or .5, perhaps with an exponent. A sign that follows a word or a number is an operator or a dash.
NUMBER = re.compile(r"(?:(?<![\w)])[-+])?(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?(?![\d])")


@dataclass(frozen=True)
class Numeric(Reward):
    relative: float = 1e-6
    absolute: float = 1e-9  # for answers near zero
    part: Part = "after_thought"

    def __post_init__(self) -> None:
        if self.relative < 0 or self.absolute < 0:
            raise ValueError("a tolerance cannot be negative")

    def __call__(self, answer: Answer) -> float:
        said = last_number(part_of(answer.text, self.part))
        right = [last_number(truth) for truth in truths(answer)]
        if None in right:
            raise ValueError(f"no number in the right answer {truths(answer)[right.index(None)]!r}")
        if said is None:
            return 0.0
        close = (
            math.isclose(said, value, rel_tol=self.relative, abs_tol=self.absolute)
            for value in right
            if value is not None
        )
        return float(any(close))

    def lacks(self, example: Example) -> str:
        return without_truth(example)


def last_number(text: str) -> float | None:
    """None where there is none, or one too large to be a number here."""
    found = NUMBER.findall(text.replace("−", "-"))
    value = float(found[-1].replace(",", "")) if found else math.inf
    return value if math.isfinite(value) else None
