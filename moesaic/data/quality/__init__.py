"""Quality scores: a number for each document, better ones higher. Each is one file, found by its name in a recipe.

    data: {quality: compression, scores: [repetition, {name: perplexity, model: out/smollm2}]}

`data.quality` becomes the column `quality`, by which phases keep the best share and curricula order; each of
`data.scores` becomes a column of the method's name. A score must depend on the documents it is given alone, so that a
preparation that was killed ends with the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from moesaic.data.records import Document


@dataclass(frozen=True)
class QualityScore:
    one_by_one: ClassVar[bool] = True  # whether a document's score is the same to the bit, whatever is scored with it

    def check(self, columns: Sequence[str], place: str) -> None:
        """A UserError if the source, whose records have these number columns, cannot be scored."""

    def score(self, documents: Sequence[Document]) -> list[float]:
        raise NotImplementedError
