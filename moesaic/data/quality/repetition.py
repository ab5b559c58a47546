"""The share of a text's word runs that it does not repeat: 1 for text without repetition, near 0 for a loop.

data: {quality: {name: repetition, words: 4}}
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moesaic.data.quality import QualityScore
from moesaic.data.records import Document

LIMIT = 100_000  # words that are looked at, so that one huge document does not take the memory


@dataclass(frozen=True)
class RepetitionScore(QualityScore):
    words: int = 4

    def __post_init__(self) -> None:
        if self.words < 1:
            raise ValueError("words is the length of a run, at least 1")

    def score(self, documents: Sequence[Document]) -> list[float]:
        return [self._of(document.text.split(None, LIMIT)[:LIMIT]) for document in documents]

    def _of(self, words: list[str]) -> float:
        runs = len(words) - self.words + 1
        if runs <= 0:
            return 1.0
        return len({tuple(words[at : at + self.words]) for at in range(runs)}) / runs
