"""A number that the records bring along, such as the score of a classifier.

    data:
      sources: [{name: web, path: web.jsonl, columns: [edu]}]
      quality: {name: column, column: edu}

With `descending`, lower is better (a perplexity, a toxicity).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moesaic.data.quality import QualityScore
from moesaic.data.records import Document
from moesaic.errors import UserError


@dataclass(frozen=True)
class ColumnScore(QualityScore):
    column: str
    descending: bool = False

    def check(self, columns: Sequence[str], place: str) -> None:
        if self.column not in columns:
            raise UserError(place, f'has no column "{self.column}"', "Name it in the columns of the source.")

    def score(self, documents: Sequence[Document]) -> list[float]:
        sign = -1.0 if self.descending else 1.0
        return [sign * document.fields[self.column] for document in documents]
