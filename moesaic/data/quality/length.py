"""Longer is better, in characters and on a logarithmic scale: fragments and menus are short.

data: {quality: {name: length, max_characters: 100000}}
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from moesaic.data.quality import QualityScore
from moesaic.data.records import Document


@dataclass(frozen=True)
class LengthScore(QualityScore):
    max_characters: int | None = None  # longer than that is no better

    def __post_init__(self) -> None:
        if self.max_characters is not None and self.max_characters < 1:
            raise ValueError(f"max_characters must be at least 1, not {self.max_characters}")

    def score(self, documents: Sequence[Document]) -> list[float]:
        return [
            math.log1p(min(len(document.text), self.max_characters or len(document.text))) for document in documents
        ]
