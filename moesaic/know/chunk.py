"""What every part of the knowledge room passes around: a chunk of a document, and a chunk that was found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True)
class Chunk:
    """A piece of a document's text. `document.text[start:end] == text`, so that what is quoted can be found again."""

    id: str  # stable: of the document's content and the place in it
    document: str  # the document's id
    source: str  # what a reader knows it by: a path below what was indexed, or a URL
    title: str
    text: str
    start: int
    end: int
    headings: tuple[str, ...] = ()  # those above it, outermost first
    page: int | None = None  # of a PDF, from 1

    @property
    def passage(self) -> str:
        """What is indexed and embedded: the text below its title and those of its headings that it does not hold."""
        above = (self.title, *self.headings)
        return "\n".join([*dict.fromkeys(title for title in above if title not in self.text), self.text])


@dataclass(frozen=True)
class Hit:
    chunk: Chunk
    row: int  # of the chunk in the knowledge base
    score: float  # the higher the better; comparable within one search only
    parts: Mapping[str, float] = field(default_factory=dict)  # what each index made of it: words, vectors, graph


class Retriever(Protocol):
    """What can be searched: a knowledge base, one held in memory, or a stand-in."""

    def search(self, query: str, k: int = 8) -> list[Hit]: ...
