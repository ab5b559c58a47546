"""Search by words: BM25 in Lucene's form over postings that stay on disk (Robertson and others).

Each segment holds its own postings; how rare a word is, and how long a chunk is on average, is counted over the living
chunks of all segments, so that the scores are those of one index of what is there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from moesaic.know.chunk import Chunk
from moesaic.know.search.bm25 import norm, rarity
from moesaic.know.search.tokens import query_terms, raw_words, terms
from moesaic.know.store import sorted_strings
from moesaic.know.store.part import Segment
from moesaic.know.store.sorted_strings import SortedStrings


@dataclass(frozen=True)
class WordsPart:
    name: str = "words"

    @property
    def settings(self) -> Mapping[str, Any]:
        return {"terms": 1}  # counted up when `tokens` changes

    def write(self, folder: Path, chunks: Sequence[Chunk]) -> None:
        numbers = _Numbers()
        found = [[number for word in raw_words(chunk.passage) for number in numbers[word]] for chunk in chunks]
        lengths = np.array([len(chunk) for chunk in found], np.uint32)
        terms_T = np.fromiter((number for chunk in found for number in chunk), np.int64, int(lengths.sum()))
        _write(folder, list(numbers.terms), terms_T, np.repeat(np.arange(len(chunks)), lengths), None, lengths)

    def merge(self, folder: Path, segments: Sequence[Segment]) -> None:
        numbers = _Numbers()
        terms_P, rows_P, counts_P, lengths, first = [], [], [], [], 0
        for segment in segments:
            postings = Postings(segment.folder / self.name)
            new_rows = first + np.cumsum(segment.alive) - 1
            number_of = np.array([numbers.number(term) for term in postings.terms], np.int64)
            alive_P = segment.alive[postings.rows]
            terms_P.append(np.repeat(number_of, np.diff(postings.begins))[alive_P])
            rows_P.append(new_rows[postings.rows[alive_P]])
            counts_P.append(postings.counts[alive_P])
            lengths.append(postings.lengths[segment.alive])
            first += int(segment.alive.sum())
        merged = (np.concatenate(terms_P), np.concatenate(rows_P), np.concatenate(counts_P), np.concatenate(lengths))
        _write(folder, list(numbers.terms), *merged)

    def open(self, segments: Sequence[Segment]) -> Words:
        return Words(segments, self.name)


class _Numbers(dict[str, tuple[int, ...]]):
    """Raw words to the numbers of their terms, in the order in which they are met."""

    def __init__(self) -> None:
        super().__init__()
        self.terms: dict[str, int] = {}

    def number(self, term: str) -> int:
        return self.terms.setdefault(term, len(self.terms))

    def __missing__(self, word: str) -> tuple[int, ...]:
        self[word] = numbers = tuple(self.number(term) for term in terms(word))
        return numbers


def _write(
    folder: Path,
    vocabulary: list[str],
    terms_P: np.ndarray,
    rows_P: np.ndarray,
    counts_P: np.ndarray | None,  # None: each entry is one occurrence
    lengths: np.ndarray,
) -> None:
    """Postings by term, terms in the order of their bytes. Terms that no living chunk holds are left out."""
    rows = max(len(lengths), 1)
    keys = terms_P * rows + rows_P
    if counts_P is None:
        keys, counts_P = np.unique(keys, return_counts=True)
        terms_P, rows_P = keys // rows, keys % rows
    held = np.bincount(terms_P, minlength=len(vocabulary))
    encoded = [term.encode() for term in vocabulary]
    order = sorted((number for number in range(len(encoded)) if held[number]), key=encoded.__getitem__)
    rank = np.zeros(len(vocabulary), np.int64)
    rank[order] = np.arange(len(order))
    sorted_P = np.argsort(rank[terms_P] * rows + rows_P, kind="stable")
    kept = [encoded[number] for number in order]
    np.save(folder / "begins.npy", np.concatenate([[0], np.cumsum(held[order])]).astype(np.int64))
    np.save(folder / "rows.npy", rows_P[sorted_P].astype(np.uint32))
    np.save(folder / "counts.npy", np.minimum(counts_P[sorted_P], 2**16 - 1).astype(np.uint16))
    np.save(folder / "lengths.npy", lengths.astype(np.uint32))
    sorted_strings.write(folder, "terms", kept)


class Postings:
    """What one segment holds, mapped into memory."""

    def __init__(self, folder: Path) -> None:
        self.begins = _mapped(folder / "begins.npy")
        self.rows = _mapped(folder / "rows.npy")
        self.counts = _mapped(folder / "counts.npy")
        self.lengths = np.load(folder / "lengths.npy")
        self.terms = SortedStrings(folder, "terms")

    def find(self, term: str) -> slice:
        """Where the postings of a term lie; nowhere if it has none."""
        number = self.terms.find(term.encode())
        return slice(0, 0) if number is None else slice(int(self.begins[number]), int(self.begins[number + 1]))


class Words:
    """The opened index: scores of chunks for a query."""

    def __init__(self, segments: Sequence[Segment], name: str = "words") -> None:
        self.segments = segments
        self._postings = [Postings(segment.folder / name) for segment in segments]
        self._whole = [bool(segment.alive.all()) for segment in segments]
        self.rows = sum(len(segment.alive) for segment in segments)
        self.living = sum(int(segment.alive.sum()) for segment in segments)

    @cached_property
    def mean_length(self) -> float:
        total = sum(int(p.lengths[s.alive].sum()) for p, s in zip(self._postings, self.segments))
        return total / self.living if self.living and total else 1.0

    @cached_property
    def _norms(self) -> list[np.ndarray]:
        """What a count is weighed against, per chunk."""
        return [norm(postings.lengths, self.mean_length).astype(np.float32) for postings in self._postings]

    def scores(self, query: str) -> tuple[np.ndarray, np.ndarray]:
        """Rows that hold a word of the query, in order, and their scores."""
        return self.scores_of_terms(query_terms(query))

    def search(self, query: str, k: int) -> tuple[np.ndarray, np.ndarray]:
        """The `k` best rows, the best first; of equals, the earlier."""
        rows, scores = self.scores(query)
        if len(rows) > k:
            least = np.partition(scores, len(scores) - k)[len(scores) - k]
            rows, scores = rows[scores >= least], scores[scores >= least]
        best = np.lexsort((rows, -scores))[:k]
        return rows[best], scores[best]

    def scores_of_terms(self, query: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        total = np.zeros(self.rows, np.float32)
        for term, times in Counter(query).items():
            places = [postings.find(term) for postings in self._postings]
            holding = sum(self._holding(number, place) for number, place in enumerate(places))
            if not holding:
                continue
            weight = times * rarity(self.living, holding)
            for segment, postings, norms, place in zip(self.segments, self._postings, self._norms, places):
                if place.stop > place.start:
                    rows, counts = postings.rows[place], postings.counts[place].astype(np.float32)
                    total[segment.first : segment.first + len(norms)][rows] += weight * counts / (counts + norms[rows])
        for segment, whole in zip(self.segments, self._whole):
            if not whole:
                total[segment.first : segment.first + len(segment.alive)] *= segment.alive
        rows = np.flatnonzero(total)
        return rows, total[rows]

    def _holding(self, number: int, place: slice) -> int:
        if self._whole[number] or place.start == place.stop:
            return place.stop - place.start
        return int(self.segments[number].alive[self._postings[number].rows[place]].sum())


def _mapped(file: Path) -> np.ndarray:
    return np.asarray(np.load(file, mmap_mode="r"))  # a plain array is indexed faster
