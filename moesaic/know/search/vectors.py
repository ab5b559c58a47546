"""Search by vectors: one of length one per chunk, in a file per segment, memory-mapped.

Up to EXACT rows every vector is scored. Above, segments that are large have a graph, made when they were written or
merged, and only the rows of the others, which were added since, are all scored. Rows of deleted documents are walked
through and never found. A graph with its codes is held in memory, the vectors stay in their files (`nearest.zoom`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from moesaic.errors import UserError
from moesaic.kernels import native
from moesaic.know.chunk import Chunk
from moesaic.know.search.embedded import Embedded
from moesaic.know.store.part import Segment
from moesaic.nearest import exact, zoom

BATCH = 64  # chunks that are embedded at a time: so many a build that is killed loses
FILE = "vectors.npy"
GRAPH = "graph"  # the folder beside it
EXACT = 200_000  # rows that are scored one and all
LARGE = 50_000  # rows of a segment that gets a graph
POOL = 128  # that a walk keeps: on embeddings of text it finds 99 of 100


Report = Callable[[str, int, int], None]  # what is done, how much of it so far, and of how much


class Embeds(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def dimensions(self) -> int: ...

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        """(n, dimensions) float32, each of length one."""
        ...


@dataclass(frozen=True)
class VectorPart:
    embedder: Embeds
    report: Report | None = None

    @property
    def name(self) -> str:
        return "vectors"

    @property
    def settings(self) -> Mapping[str, Any]:
        return {"model": self.embedder.name, "dimensions": self.embedder.dimensions}

    def write(self, folder: Path, chunks: Sequence[Chunk]) -> None:
        vectors_ND = create(folder / FILE, len(chunks), self.embedder.dimensions)
        texts = [passage(chunk) for chunk in chunks]
        if isinstance(self.embedder, Embedded):
            self.embedder.begin(texts)
        for first in range(0, len(chunks), BATCH):
            batch = texts[first : first + BATCH]
            vectors_ND[first : first + len(batch)] = self.embedder.embed(batch)
            if self.report is not None:
                self.report("embedding", first + len(batch), len(chunks))
        close(folder / FILE, vectors_ND)
        connect(folder, len(chunks), self.report)

    def remember(self, folder: Path, first: int, chunks: Sequence[Chunk]) -> None:
        if isinstance(self.embedder, Embedded):
            self.embedder.remember(folder / FILE, first, [passage(chunk) for chunk in chunks])

    def merge(self, folder: Path, segments: Sequence[Segment]) -> None:
        count = sum(int(np.count_nonzero(segment.alive)) for segment in segments)
        vectors_ND, first = create(folder / FILE, count, self.embedder.dimensions), 0
        for segment in segments:
            kept_ND = mapped(segment.folder / self.name / FILE)[segment.alive]
            vectors_ND[first : first + len(kept_ND)] = kept_ND
            first += len(kept_ND)
        close(folder / FILE, vectors_ND)
        connect(folder, count, self.report)

    def open(self, segments: Sequence[Segment]) -> Vectors:
        return Vectors(segments, self.name, self.embedder.dimensions)


class Vectors:
    """The vectors of all segments, searched together."""

    def __init__(self, segments: Sequence[Segment], name: str, dimensions: int) -> None:
        self.segments, self.dimensions = list(segments), dimensions
        self.parts = [mapped(segment.folder / name / FILE) for segment in segments]
        for segment, vectors_ND in zip(self.segments, self.parts, strict=True):
            if vectors_ND.shape != (len(segment.alive), dimensions):
                wanted = (len(segment.alive), dimensions)
                raise UserError(
                    segment.folder / name / FILE,
                    f"holds vectors of the shape {vectors_ND.shape}, not {wanted}",
                    "It was written with another embedding model, or damaged: build the knowledge base again.",
                )

        graphs = self.count > EXACT and native.kernels() is not None
        self.graphs = [opened(segment.folder / name) if graphs else None for segment in segments]

    @property
    def count(self) -> int:
        return sum(len(vectors_ND) for vectors_ND in self.parts)

    def __len__(self) -> int:
        return self.count

    def search(self, vector_D: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Rows and cosines of the k nearest that are alive, nearest first."""
        rows_QK, scores_QK = self.search_batch(np.asarray(vector_D, dtype=np.float32)[None], k)
        return rows_QK[0], scores_QK[0]

    def search_batch(self, vectors_QD: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        found = [
            (rows_QK + segment.first, scores_QK)
            for number, segment in enumerate(self.segments)
            for rows_QK, scores_QK in [self._search_segment(number, vectors_QD, k)]
        ]
        rows_QM = np.concatenate([np.empty((len(vectors_QD), 0), np.int64), *(rows for rows, _ in found)], axis=1)
        scores_QM = np.concatenate([np.empty((len(vectors_QD), 0), np.float32), *(s for _, s in found)], axis=1)
        order_QK = np.argsort(-scores_QM, axis=1, kind="stable")[:, :k]
        return np.take_along_axis(rows_QM, order_QK, axis=1), np.take_along_axis(scores_QM, order_QK, axis=1)

    def _search_segment(self, number: int, vectors_QD: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        vectors_ND, graph, alive_N = self.parts[number], self.graphs[number], self.segments[number].alive
        living = int(np.count_nonzero(alive_N))
        k = min(k, living)
        pool = max(POOL, 2 * k) * len(vectors_ND) // max(1, living)
        # Where what is near was deleted, walks find few: wider ones, and if that is not enough, all rows.
        while graph is not None and k and pool < len(vectors_ND) // 8:
            rows_QK, scores_QK = graph.search(vectors_QD, k, pool, None if living == len(alive_N) else alive_N)
            if (rows_QK >= 0).all():
                return rows_QK, scores_QK
            pool *= 4
        return exact.search(vectors_ND, vectors_QD, max(k, 1), alive_N=alive_N)

    def vector(self, row: int) -> np.ndarray:
        for segment, vectors_ND in zip(self.segments, self.parts, strict=True):
            if segment.first <= row < segment.first + len(vectors_ND):
                found: np.ndarray = vectors_ND[row - segment.first]
                return found
        raise IndexError(f"there is no row {row}")


def passage(chunk: Chunk) -> str:
    """What is embedded: a passage seldom says itself what its document is about."""
    return chunk.text if not chunk.title or chunk.text.startswith(chunk.title) else f"{chunk.title}\n{chunk.text}"


def create(file: Path, count: int, dimensions: int) -> np.ndarray:
    """An array that grows in its file rather than in memory. (What is empty cannot be mapped.)"""
    if not count:
        return np.empty((0, dimensions), dtype=np.float32)
    return np.lib.format.open_memmap(file, mode="w+", dtype=np.float32, shape=(count, dimensions))


def close(file: Path, vectors_ND: np.ndarray) -> None:
    if isinstance(vectors_ND, np.memmap):
        vectors_ND.flush()
    else:
        np.save(file, vectors_ND)


def connect(folder: Path, count: int, report: Report | None = None) -> None:
    """The graph of a large segment."""
    if count >= LARGE and native.kernels() is not None:
        (folder / GRAPH).mkdir()

        def tell(what: str, part: float) -> None:
            if report is not None:
                report("connecting vectors", round(part * count), count)

        zoom.build(folder / FILE, folder / GRAPH, report=tell)


def opened(folder: Path) -> zoom.Zoom | None:
    return zoom.Zoom(folder / FILE, folder / GRAPH) if (folder / GRAPH).exists() else None


def mapped(file: Path) -> np.ndarray:
    try:
        return np.load(file, mmap_mode="r")
    except ValueError:  # what is empty cannot be mapped
        return np.load(file)
    except OSError as error:
        raise UserError(file, f"cannot be read: {error}", "Build the knowledge base again.") from error
