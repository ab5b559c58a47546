"""Right if it is the right answer word for word; case, spaces and outer punctuation do not count."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass

from moesaic.align.rewards import Reward, without_truth
from moesaic.worlds.example import Example
from moesaic.worlds.judges import Answer
from moesaic.worlds.judges.answer_part import Part, part_of, truths


@dataclass(frozen=True)
class Exact(Reward):
    part: Part = "after_thought"
    strict: bool = False  # then only spaces at both ends do not count
    articles: bool = True  # whether a, an and the count

    def __call__(self, answer: Answer) -> float:
        said = self.normal(part_of(answer.text, self.part))
        return float(any(said == self.normal(truth) for truth in truths(answer)))

    def lacks(self, example: Example) -> str:
        return without_truth(example)

    def normal(self, text: str) -> str:
        if self.strict:
            return text.strip()
        text = unicodedata.normalize("NFKC", text).casefold()
        if not self.articles:
            text = re.sub(r"\b(a|an|the)\b", " ", text)
        text = " ".join(text.split())
        # A sign before a number is not punctuation, and an answer of nothing but punctuation is left alone.
        return re.sub(r"^[\s.,:;!?\"'`*_]+|[\s.,:;!?\"'`*_]+$", "", text) or text
