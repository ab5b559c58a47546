"""What is extracted from chunks: the entities each names, and triples with the row they were read in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from moesaic.know.chunk import Chunk

ALSO_CALLED = "also called"  # the relation of two names of one entity
WITH = "with"  # that of two names side by side in a sentence, when nothing more is known


@dataclass(frozen=True)
class Triple:
    subject: str
    relation: str
    object: str
    row: int  # of the chunk that says so


@dataclass(frozen=True)
class Extraction:
    """Of one chunk. Names are as the text writes them; those of a triple need not be among `names`."""

    names: Mapping[str, int]  # how often each is named
    triples: Sequence[tuple[str, str, str]] = ()
    titles: Sequence[str] = ()  # what the chunk is about: its title and headings


class Extractor(Protocol):
    @property
    def settings(self) -> Mapping[str, Any]:
        """What its output depends on besides the text, as JSON."""
        ...

    def extract(self, chunks: Sequence[Chunk]) -> list[Extraction]:
        """One for each chunk, in order. Chunks of one document are side by side, so names can be aligned in it."""
        ...
