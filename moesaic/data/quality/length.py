"""Longer is better, in characters and on a logarithmic scale: fragments and menus are short.

data: {quality: {name: length, most: 100000}}
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from moesaic.data.quality import QualityScore
from moesaic.data.records import Document


@dataclass(frozen=True)
class LengthScore(QualityScore):
    most: int | None = None  # characters; longer than that is no better

    def __post_init__(self) -> None:
        if self.most is not None and self.most < 1:
            raise ValueError(f"most is a number of characters, at least 1, not {self.most}")

    def score(self, documents: Sequence[Document]) -> list[float]:
        return [math.log1p(min(len(document.text), self.most or len(document.text))) for document in documents]
