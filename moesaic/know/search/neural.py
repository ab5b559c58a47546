"""A graph neural scorer over the mutual index: two layers of message passing between the chunks that a walk came by,
one of which names what the other is about. (Neighbours are cached once per graph, as FreshGNN caches them; CogDL.)

The weights, 800 numbers in neural.json, were trained by bench/know_scorer.py on the 200 training questions of HotpotQA
and MuSiQue that the walk's constants were chosen on. A search costs some small matmuls of NumPy beside the walk's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from scipy import sparse

from moesaic.know.search.fusion import DEPTH, Ranked, best, normalised
from moesaic.know.search.mutual import Mutual

WEIGHTS = Path(__file__).with_name("neural.json")
FEATURES = 7
TINY = 1e-9


@dataclass(frozen=True)
class Candidates:
    """Of one question: C chunks, their F features, which is a neighbour of which, and the mutual index's score."""

    rows_C: np.ndarray
    x_CF: np.ndarray
    neighbours_CC: np.ndarray  # rows sum to one, or to nothing
    score_C: np.ndarray  # a logarithm


class Neural:
    def __init__(self, mutual: Mutual, weights: Mapping[str, np.ndarray] | None = None) -> None:
        self.mutual = mutual
        self._weights = weights

    @cached_property
    def weights(self) -> Mapping[str, np.ndarray]:
        if self._weights is not None:
            return self._weights
        return {name: np.array(value, np.float32) for name, value in json.loads(WEIGHTS.read_text()).items()}

    @cached_property
    def _about(self) -> sparse.csr_array:
        return sparse.csr_array(self.mutual.graph.titles @ sparse.diags_array(self._rarity))

    @cached_property
    def _naming(self) -> sparse.csr_array:
        counts = self.mutual.graph.counts.copy()
        counts.data = np.minimum(counts.data, 1)
        return sparse.csr_array((counts + 2 * self.mutual.graph.titles) @ sparse.diags_array(self._rarity))

    @cached_property
    def _rarity(self) -> np.ndarray:
        rows = max(self.mutual.graph.rows, 1)
        rarity: np.ndarray = np.log1p(rows / np.maximum(self.mutual.named_by, 1)) / np.log1p(rows)
        return rarity

    def candidates(self, query: str, lists: Sequence[Ranked], most: int = DEPTH) -> Candidates:
        """`lists`: what words found, and vectors where there are any."""
        rows = self.mutual.graph.rows
        found = normalised(lists)
        by_list = [np.zeros(rows) for _ in range(3)]  # words, vectors, both
        for scores_R, (numbers, scores) in zip(
            by_list, [normalised(lists[:1]), normalised(lists[1:]), found], strict=True
        ):
            scores_R[numbers] = scores
        visits_R = self.mutual.visits(query, found)
        score_R = visits_R * np.exp(2 * self.mutual.walk.found * by_list[2])
        taken = np.union1d(np.argsort(-score_R, kind="stable")[:most], found[0][: most // 2])
        rows_C = taken[(score_R[taken] > 0) | (by_list[2][taken] > 0)]
        named = np.zeros(len(self.mutual.graph.entities))
        for number, sure in self.mutual.graph.linker.mentioned(query).items():
            named[number] = sure / max(1, self.mutual.named_by[number])
        visited_C = np.log(visits_R[rows_C] + 1e-6)
        visited_C = visited_C - visited_C.max(initial=-14.0)
        about_CN, naming_CN = self._about[rows_C], self._naming[rows_C]
        x_CF = np.stack(
            [
                *(scores_R[rows_C] for scores_R in by_list),
                visited_C / 5,
                np.exp(visited_C),
                np.asarray(about_CN @ named).ravel() > 0,
                np.minimum(np.asarray(naming_CN @ named).ravel(), 2),
            ],
            axis=1,
        ).astype(np.float32)
        shared_CC = (naming_CN @ about_CN.T).toarray()
        shared_CC = shared_CC + shared_CC.T
        np.fill_diagonal(shared_CC, 0)
        neighbours_CC = (shared_CC / np.maximum(shared_CC.sum(axis=1, keepdims=True), TINY)).astype(np.float32)
        return Candidates(rows_C, x_CF, neighbours_CC, np.log(score_R[rows_C] + TINY).astype(np.float32))

    def search(self, query: str, lists: Sequence[Ranked], k: int) -> Ranked:
        found = self.candidates(query, lists, max(DEPTH, k))
        if not len(found.rows_C):
            return found.rows_C, found.score_C
        rows, scores = best(found.rows_C, self.scores(found), k)
        return rows, np.exp(scores - scores[0])

    def scores(self, found: Candidates) -> np.ndarray:
        w, near_CC = self.weights, found.neighbours_CC
        h_CD = found.x_CF
        for layer in ("first", "second"):
            own, beside = h_CD @ w[f"{layer}.own"].T, near_CC @ h_CD @ w[f"{layer}.beside"].T
            h_CD = np.maximum(own + beside + w[f"{layer}.bias"], 0)
        score_C: np.ndarray = h_CD @ w["out"] + found.score_C
        return score_C
