"""A knowledge base, opened to be searched: what it held at that moment, whatever is built meanwhile.

base = KnowledgeBase.open("kb")
for hit in base.search("who wrote it?"):
    print(hit.chunk.source, hit.chunk.text)
"""

from __future__ import annotations

import tempfile
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moesaic.errors import UserError
from moesaic.know.build import index
from moesaic.know.chunk import Chunk, Hit
from moesaic.know.documents.document import Document
from moesaic.know.graph.graph import Graph
from moesaic.know.graph.part import GraphPart
from moesaic.know.parts import Asked, QueryEmbeds, recorded_embedder, vector_part
from moesaic.know.search.fusion import DEPTH, Ranked, normalised
from moesaic.know.search.mutual import Mutual
from moesaic.know.search.neural import Neural
from moesaic.know.search.words import Words, WordsPart
from moesaic.know.store import manifest as manifests
from moesaic.know.store.directory import placed
from moesaic.know.store.part import Segment
from moesaic.know.store.segment import SegmentReader, StoredDocument

if TYPE_CHECKING:
    from moesaic.know.search.vectors import Vectors

METHODS = ("auto", "words", "vectors", "fusion", "mutual", "neural")


class KnowledgeBase:
    def __init__(self, path: Path, temporary: Any = None, embedder: QueryEmbeds | None = None) -> None:
        self.path = path
        self._embedder = embedder
        self._temporary = temporary  # goes with this object
        self.manifest, self._opened = manifests.read(path)
        folder = path / "segments"
        self._readers = [SegmentReader(folder / entry.name) for entry in self.manifest.segments]
        alive = [
            reader.alive(entry.deleted) if entry.deleted else np.ones(entry.chunks, bool)
            for reader, entry in zip(self._readers, self.manifest.segments)
        ]
        self.segments: list[Segment] = placed(folder, self.manifest.segments, alive)
        self.alive = np.concatenate(alive) if alive else np.zeros(0, bool)  # of every row
        self._firsts = [segment.first for segment in self.segments]

    @classmethod
    def open(cls, path: str | Path) -> KnowledgeBase:
        return cls(Path(path))

    @classmethod
    def of_texts(
        cls, texts: Sequence[tuple[str, str]], embedder: QueryEmbeds | None = None, extract: str = "patterns"
    ) -> KnowledgeBase:
        """A base of titles and texts that lasts as long as the object."""
        temporary = tempfile.TemporaryDirectory(prefix="moesaic-know-")
        documents = [Document(title, title, text) for title, text in texts if text.strip()]
        index(documents, Path(temporary.name), Asked(embedder=embedder, extract=extract))
        return cls(Path(temporary.name), temporary, embedder)

    @property
    def rows(self) -> int:
        """Chunks, those of deleted documents among them."""
        return len(self.alive)

    @property
    def chunk_count(self) -> int:
        return int(self.alive.sum())

    def chunk(self, row: int) -> Chunk:
        if not 0 <= row < self.rows:
            raise IndexError(f"row {row} of {self.rows}")
        segment = bisect_right(self._firsts, row) - 1
        return self._readers[segment].chunk(row - self._firsts[segment])

    def chunks(self) -> Iterator[tuple[int, Chunk]]:
        """Those that count, each with its row."""
        return ((int(row), self.chunk(int(row))) for row in np.flatnonzero(self.alive))

    def documents(self) -> Iterator[StoredDocument]:
        for reader, entry in zip(self._readers, self.manifest.segments):
            deleted = set(entry.deleted)
            yield from (document for number, document in enumerate(reader.documents()) if number not in deleted)

    def text(self, document: str) -> str:
        """The whole text of a document, by its id."""
        for reader in self._readers:
            for stored in reader.documents():
                if stored.id == document:
                    return reader.text(stored)
        raise UserError(document, f"{self.path} has no such document", f"See them: moesaic know show {self.path}")

    @cached_property
    def words(self) -> Words:
        return WordsPart().open(self.segments)

    @cached_property
    def embedder(self) -> QueryEmbeds | None:
        """The model of the vectors, which is loaded when it first embeds; None if the base has none."""
        return self._embedder or recorded_embedder(self.manifest)

    @cached_property
    def vectors(self) -> Vectors | None:
        return None if self.embedder is None else vector_part(self.embedder).open(self.segments)

    @cached_property
    def graph(self) -> Graph | None:
        return GraphPart().open(self.segments) if "graph" in self.manifest.parts else None

    @cached_property
    def mutual(self) -> Mutual | None:
        return None if self.graph is None else Mutual(self.graph)

    @cached_property
    def neural(self) -> Neural | None:
        return None if self.mutual is None else Neural(self.mutual)

    def search(self, query: str, k: int = 8, method: str = "auto") -> list[Hit]:
        """`auto` uses all that the base has: its graph, and vectors where it has them."""
        if method not in METHODS:
            raise UserError("method", f"{method!r} is not one of {', '.join(METHODS)}", "Name one of them.")
        if method == "words":
            return self._hits(self.words.search(query, k), {}, method)
        if method == "vectors":
            return self._hits(self._by_vectors(query, k), {}, method)
        depth = max(DEPTH, k)
        lists = {"words": self.words.search(query, depth)}
        if method == "fusion" or self.vectors is not None:
            lists["vectors"] = self._by_vectors(query, depth)
        found = normalised(list(lists.values()), depth)
        if method == "fusion" or (method == "auto" and self.mutual is None):
            return self._hits((found[0][:k], found[1][:k]), lists)
        if self.mutual is None:
            remedy = f"Add one: moesaic know build … --out {self.path} --extract patterns"
            raise UserError("method", f"{method}: {self.path} has no graph", remedy)
        if method == "neural" and self.neural is not None:
            return self._hits(self.neural.search(query, list(lists.values()), k), lists, "graph")
        return self._hits(self.mutual.search(query, found, k), lists, "graph")

    def _by_vectors(self, query: str, k: int) -> Ranked:
        if self.vectors is None or self.embedder is None:
            remedy = f"Add them: moesaic know build … --out {self.path} --embed DIR"
            raise UserError("method", f"vectors: {self.path} has none", remedy)
        return self.vectors.search(self.embedder.embed_query(query), k)

    def _hits(self, found: Ranked, lists: Mapping[str, Ranked], part: str | None = None) -> list[Hit]:
        """With what each index made of them; `part` is the one whose scores `found` has."""
        by_row = {name: dict(zip(rows.tolist(), scores.tolist())) for name, (rows, scores) in lists.items()}
        hits = []
        for row, score in zip(found[0].tolist(), found[1].tolist()):
            parts = {name: scores[row] for name, scores in by_row.items() if row in scores}
            hits.append(Hit(self.chunk(row), row, score, parts | ({part: score} if part else {})))
        return hits

    def close(self) -> None:
        """Lets go of what was opened: a build may then remove it."""
        self._opened.close()
        if self._temporary is not None:
            self._temporary.cleanup()

    def __enter__(self) -> KnowledgeBase:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
