"""Search local text: passages of files, the most fitting first (BM25, Robertson and others).

tools: [{name: search, path: docs, passages: 2}]
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from moesaic.errors import UserError
from moesaic.know.search.bm25 import norm, rarity
from moesaic.worlds.stage_outputs import is_stage_output
from moesaic.worlds.tools import Tool, one_text

ENDINGS = (".txt", ".md", ".rst")


@dataclass(frozen=True)
class Search(Tool):
    description: ClassVar[str] = "Find passages of text that fit a query."
    parameters: ClassVar[dict[str, Any]] = one_text("query")

    path: str = ""  # a file, or a folder of .txt, .md and .rst; passages are paragraphs
    passages: int = 2  # that are shown
    longest: int = 600  # characters of one
    saturation: float = 1.2  # how soon more of the same word says no more
    shortening: float = 0.75  # how much a long passage must say more

    def __post_init__(self) -> None:
        if not self.path or self.passages < 1:
            raise ValueError("search needs the path of a text or a folder of texts, and passages of at least 1")
        if not is_stage_output(self.path):
            _ = self._index  # what cannot be searched is told now, not when a model first tries

    def __call__(self, **arguments: Any) -> str:
        query = arguments.get("query")
        if not isinstance(query, str) or not query.strip():
            raise ValueError("query must be text")
        return "\n\n".join(self.find(query)) or "(nothing was found)"

    def find(self, query: str) -> list[str]:
        scores = self._index.scores(words(query), self.saturation, self.shortening)
        best = sorted(scores, key=lambda number: (-scores[number], number))[: self.passages]
        return [self._index.passages[number][: self.longest] for number in best]

    @property
    def texts(self) -> list[str]:
        """Every passage."""
        return self._index.passages

    @cached_property
    def _index(self) -> Index:
        place = Path(self.path)
        files = sorted(f for f in place.rglob("*") if f.suffix in ENDINGS) if place.is_dir() else [place]
        try:
            texts = [file.read_text(encoding="utf-8") for file in files]
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(place, f"cannot be read ({error})", "Name a text or a folder of texts.") from None
        passages = [part.strip() for text in texts for part in re.split(r"\n\s*\n", text) if part.strip()]
        if not passages:
            raise UserError(place, "holds no text to search", f"Name a file, or a folder of {', '.join(ENDINGS)}.")
        return Index(passages)


class Index:
    def __init__(self, passages: list[str]) -> None:
        self.passages = passages
        self.counts = [Counter(words(passage)) for passage in passages]
        self.lengths = [sum(count.values()) for count in self.counts]
        self.mean = sum(self.lengths) / len(self.lengths) or 1.0
        self.holding: dict[str, list[int]] = {}
        for number, count in enumerate(self.counts):
            for word in count:
                self.holding.setdefault(word, []).append(number)

    def scores(self, query: list[str], saturation: float, shortening: float) -> dict[int, float]:
        """Of every passage that holds a word of the query."""
        scores: dict[int, float] = {}
        for word in query:
            numbers = self.holding.get(word, [])
            most = rarity(len(self.passages), len(numbers)) * (saturation + 1)
            for number in numbers:
                times = self.counts[number][word]
                against = norm(float(self.lengths[number]), self.mean, saturation, shortening)
                scores[number] = scores.get(number, 0.0) + most * times / (times + against)
        return scores


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text.casefold())
