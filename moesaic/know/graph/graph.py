"""The chunk-entity graph of a whole knowledge base: which chunk names which entity, and what is said of two of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy import sparse

from moesaic.know.graph.alignment import alike, near
from moesaic.know.graph.linking import Linker
from moesaic.know.graph.names import key
from moesaic.know.graph.triple import ALSO_CALLED, Triple


@dataclass(frozen=True)
class Arrays:
    """Of one segment, or of all: `mentions` (row, name, count, whether it is a title), `triples` (subject, relation,
    object, row), numbers of `names` and `relations`."""

    names: Sequence[str]
    relations: Sequence[str]
    mentions: np.ndarray
    triples: np.ndarray


class Graph:
    def __init__(self, segments: Sequence[tuple[int, np.ndarray, Arrays]]) -> None:
        """Of (first row, alive, arrays) of each segment."""
        self.places: dict[str, int] = {}  # entity by the key of its names
        self.entities: list[str] = []
        self.relations: list[str] = []
        relation_places: dict[str, int] = {}
        mentions, triples = [np.zeros((0, 4), np.int64)], [np.zeros((0, 4), np.int64)]
        self.rows = 0
        for first, alive, arrays in segments:
            entity = np.array([self._entity(name) for name in arrays.names], dtype=np.int64)
            relation = np.array(
                [relation_places.setdefault(name, len(relation_places)) for name in arrays.relations], dtype=np.int64
            )
            found = arrays.mentions[alive[arrays.mentions[:, 0]]]
            mentions.append(np.stack([found[:, 0] + first, entity[found[:, 1]], found[:, 2], found[:, 3]], axis=1))
            said = arrays.triples[alive[arrays.triples[:, 3]]]
            triples.append(
                np.stack([entity[said[:, 0]], relation[said[:, 1]], entity[said[:, 2]], said[:, 3] + first], axis=1)
            )
            self.rows = max(self.rows, first + len(alive))
        self.relations = list(relation_places)
        self.mentions = np.concatenate(mentions)
        self.said = np.concatenate(triples)

    def _entity(self, name: str) -> int:
        number = self.places.setdefault(key(name), len(self.entities))
        if number == len(self.entities):
            self.entities.append(name)
        return number

    @cached_property
    def counts(self) -> sparse.csr_array:
        """How often each row (R) names each entity (N)."""
        return self._matrix(self.mentions[self.mentions[:, 3] == 0])

    @cached_property
    def titles(self) -> sparse.csr_array:
        """Which entity each row is about."""
        return self._matrix(self.mentions[self.mentions[:, 3] == 1])

    def _matrix(self, mentions: np.ndarray) -> sparse.csr_array:
        shape = (self.rows, len(self.entities))
        return sparse.csr_array((mentions[:, 2].astype(np.float32), (mentions[:, 0], mentions[:, 1])), shape=shape)

    @cached_property
    def _of_entity(self) -> sparse.csr_array:
        return sparse.csr_array((self.counts + self.titles).T)

    @cached_property
    def _of_row(self) -> sparse.csr_array:
        return sparse.csr_array(self.counts + self.titles)

    @cached_property
    def synonyms(self) -> np.ndarray:
        """Pairs of entities that probably are one."""
        called = self.relations.index(ALSO_CALLED) if ALSO_CALLED in self.relations else -1
        pairs = {(int(a), int(b)) for a, r, b, _ in self.said[self.said[:, 1] == called] if a != b}
        pairs |= set(alike(list(self.places), self.entities))
        return np.array(sorted({(min(pair), max(pair)) for pair in pairs}), dtype=np.int64).reshape(-1, 2)

    def align(self, embed: Callable[[list[str]], np.ndarray], least: float = 0.9) -> int:
        """Joins names whose vectors are near, too (KAG's semantic alignment), and says how many pairs there are now. It
        embeds every name, which takes longer than all else, so it is done only where asked, before a search."""
        pairs = np.array(near(list(self.places), embed(self.entities), least), dtype=np.int64).reshape(-1, 2)
        self.synonyms = np.unique(np.concatenate([self.synonyms, pairs]), axis=0)
        return len(self.synonyms)

    @cached_property
    def linker(self) -> Linker:
        return Linker(self.places)

    def mentioned(self, text: str) -> dict[str, float]:
        """Entities that a question names, and how surely each is meant."""
        return {self.entities[number]: weight for number, weight in self.linker.mentioned(text).items()}

    def chunks_of(self, entity: str) -> list[int]:
        """Rows that name an entity or are about it."""
        number = self.places.get(key(entity))
        return [] if number is None else [int(row) for row in self._row(self._of_entity, number)]

    def entities_of(self, row: int) -> list[str]:
        return [self.entities[number] for number in self._row(self._of_row, row)]

    @staticmethod
    def _row(matrix: sparse.csr_array, number: int) -> np.ndarray:
        return np.sort(matrix.indices[matrix.indptr[number] : matrix.indptr[number + 1]])

    def triples(self) -> Iterator[Triple]:
        for subject, relation, other, row in self.said.tolist():
            yield Triple(self.entities[subject], self.relations[relation], self.entities[other], row)
