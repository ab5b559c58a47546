"""A knowledge base as a server searches it: `moesaic serve DIR --know KB`.

The server knows its bases by a form of its own (`serve/api/knowledge.py`); this is what fills it in. A base that is
built anew meanwhile is opened anew before the next search.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from moesaic.errors import UserError
from moesaic.know import knowledge_base
from moesaic.know.answer.served import checked_citations
from moesaic.know.chunk import Chunk
from moesaic.know.knowledge_base import KnowledgeBase
from moesaic.know.store import manifest
from moesaic.serve.api.knowledge import Bases, Citation, Passage


class ServedBase:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.base = self._opened()

    def _opened(self) -> KnowledgeBase:
        """With all its parts and its embedding model: what is wrong with them shows at the start, and no first question
        waits for them."""
        base = KnowledgeBase.open(self.path)
        try:
            base.search("a", 1)
        except (OSError, ValueError, KeyError) as error:
            raise UserError(
                self.path, f"cannot be searched ({error})", "Build it again, in another directory."
            ) from None
        return base

    @property
    def rows(self) -> int:
        return self.base.chunk_count

    @property
    def methods(self) -> Sequence[str]:
        """Those for which the base has what they need."""
        parts = self.base.manifest.parts
        needs = {"vectors": "vectors", "fusion": "vectors", "mutual": "graph", "neural": "graph"}
        return tuple(one for one in knowledge_base.METHODS if one not in needs or needs[one] in parts)

    def search(self, query: str, k: int, method: str) -> list[Passage]:
        self._refresh()
        return [_passage(hit.chunk, hit.row, hit.score) for hit in self.base.search(query, k, method)]

    def fetch(self, name: str) -> Passage | None:
        """A passage, or a whole document by its id. A row means something within one opened base only, so the chunk
        must be the one that was found."""
        row, _, chunk_id = name.partition("-")
        if (
            row.isascii()
            and row.isdigit()
            and len(row) < 12
            and int(row) < self.base.rows
            and self.base.alive[int(row)]
        ):
            chunk = self.base.chunk(int(row))
            if chunk.id == chunk_id:
                return _passage(chunk, int(row))
        for stored in self.base.documents():
            if stored.id == name:
                text = self.base.text(name)
                return Passage(name, stored.source, stored.title, text, 0, len(text), document=name)
        return None

    def cite(self, question: str, answer: str, passages: Sequence[Passage]) -> list[Citation]:
        return checked_citations(answer, passages)

    def _refresh(self) -> None:
        newest = manifest.numbers(self.path)[-1:]
        if newest and newest[0] != self.base.manifest.number:
            old, self.base = self.base, self._opened()
            old.close()


def _passage(chunk: Chunk, row: int, score: float = 0.0) -> Passage:
    title = " › ".join([chunk.title, *(one for one in chunk.headings if one != chunk.title)])
    return Passage(
        id=f"{row}-{chunk.id}",
        source=chunk.source,
        title=title,
        text=chunk.text,
        start=chunk.start,
        end=chunk.end,
        score=float(score),
        document=chunk.document,
        page=chunk.page,
    )


def open_bases(given: Sequence[str]) -> Bases:
    """Those of `--know`: a directory, whose name is the base's, or `NAME=DIR`."""
    found: dict[str, ServedBase] = {}
    for word in given:
        name, equals, path = word.partition("=")
        directory = Path(path if equals and not Path(word).exists() else word)
        name = name if directory == Path(path) and equals else directory.resolve().name
        if not name or len(name) > 64 or not all(letter.isalnum() or letter in "._-" for letter in name):
            raise UserError("--know", f"{name!r} is no name of a base", "Take letters, digits, dots and dashes.")
        if name in found:
            raise UserError("--know", f"two bases are called {name}", "Give each a name of its own: --know NAME=DIR.")
        found[name] = ServedBase(directory)
    return Bases(found)
