"""The graph as a part of a knowledge base: written once per segment, memory-mapped, opened over all of them.

    names.txt, relations.txt    one to a line, in the order first met
    mentions.npy                (row in the segment, name, count, whether it is the chunk's title)
    triples.npy                 (subject, relation, object, row in the segment)

Names are kept as each chunk writes them; which of them are one entity is decided when the graph is opened, so what a
document added or removed changes is only its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moesaic.know.chunk import Chunk
from moesaic.know.graph.graph import Arrays, Graph
from moesaic.know.graph.patterns import PatternExtractor
from moesaic.know.graph.triple import Extraction, Extractor
from moesaic.know.store.part import Segment


class GraphPart:
    name = "graph"

    def __init__(self, extractor: Extractor | None = None) -> None:
        self.extractor = extractor or PatternExtractor()

    @property
    def settings(self) -> Mapping[str, Any]:
        return self.extractor.settings

    def write(self, folder: Path, chunks: Sequence[Chunk]) -> None:
        write(folder, arrays_of(self.extractor.extract(chunks)))

    def merge(self, folder: Path, segments: Sequence[Segment]) -> None:
        write(
            folder,
            arrays_of(
                itertools.chain.from_iterable(extractions(read(s.folder / self.name), s.alive) for s in segments)
            ),
        )

    def open(self, segments: Sequence[Segment]) -> Graph:
        return Graph([(segment.first, segment.alive, read(segment.folder / self.name)) for segment in segments])


def arrays_of(extractions: Iterable[Extraction]) -> Arrays:
    names: dict[str, int] = {}
    relations: dict[str, int] = {}
    mentions: list[tuple[int, int, int, int]] = []
    triples: list[tuple[int, int, int, int]] = []

    def number(name: str) -> int:
        return names.setdefault(" ".join(name.split()), len(names))

    for row, extraction in enumerate(extractions):
        mentions += [(row, number(name), 1, 1) for name in extraction.titles]
        mentions += [(row, number(name), count, 0) for name, count in extraction.names.items()]
        triples += [
            (number(a), relations.setdefault(" ".join(r.split()), len(relations)), number(b), row)
            for a, r, b in extraction.triples
        ]
    return Arrays(
        list(names),
        list(relations),
        np.array(mentions, dtype=np.int32).reshape(-1, 4),
        np.array(triples, dtype=np.int32).reshape(-1, 4),
    )


def extractions(arrays: Arrays, alive: np.ndarray) -> Iterator[Extraction]:
    """What was extracted from the living chunks, read back."""
    mention_ends = np.searchsorted(arrays.mentions[:, 0], np.arange(len(alive) + 1))
    triple_ends = np.searchsorted(arrays.triples[:, 3], np.arange(len(alive) + 1))
    for row in np.flatnonzero(alive):
        mentions = arrays.mentions[mention_ends[row] : mention_ends[row + 1]].tolist()
        said = arrays.triples[triple_ends[row] : triple_ends[row + 1]].tolist()
        yield Extraction(
            {arrays.names[name]: count for _, name, count, title in mentions if not title},
            [(arrays.names[a], arrays.relations[r], arrays.names[b]) for a, r, b, _ in said],
            [arrays.names[name] for _, name, _, title in mentions if title],
        )


def write(folder: Path, arrays: Arrays) -> None:
    (folder / "names.txt").write_text("".join(f"{name}\n" for name in arrays.names), encoding="utf-8")
    (folder / "relations.txt").write_text("".join(f"{name}\n" for name in arrays.relations), encoding="utf-8")
    np.save(folder / "mentions.npy", arrays.mentions)
    np.save(folder / "triples.npy", arrays.triples)


def read(folder: Path) -> Arrays:
    return Arrays(
        _lines(folder / "names.txt"),
        _lines(folder / "relations.txt"),
        np.load(folder / "mentions.npy", mmap_mode="r"),
        np.load(folder / "triples.npy", mmap_mode="r"),
    )


def _lines(file: Path) -> list[str]:
    return file.read_text(encoding="utf-8").split("\n")[:-1]
