"""SaberLDA (Li et al. 2017): topics drawn from their conditional, in time that goes with those a document has.

    data: {topics: {steps: 0}}

The conditional of a token's topic is (its document's count + alpha) x (its word's count + beta) / (words of the topic).
The part with the document's counts has as many terms as the document has topics, few; the part with alpha is the same
for all tokens of a word. A token's own count is left out of the document's and the word's. Weights are whole numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from moesaic.data.topics.corpus import Block, Words
from moesaic.data.topics.draws import lower, mixed, places, upper

ONE = 2.0**40


@dataclass(frozen=True)
class SaberSweep:
    """What all tokens look at, until counts are renewed."""

    blocks: ClassVar[int] = 4  # that look at the same counts: more threads than these find no work

    words: Words
    counts_WK: np.ndarray
    alpha: float
    beta: float
    key: int
    scale_K: np.ndarray
    library: Any = None

    @classmethod
    def of(
        cls,
        words: Words,
        counts_WK: np.ndarray,
        alpha: float,
        beta: float,
        keys_14: np.ndarray,
        library: Any,
        threads: int,
    ) -> SaberSweep:
        scale_K = ONE / (counts_WK.sum(0) + len(counts_WK) * beta)
        return cls(words, counts_WK, alpha, beta, int(keys_14[0, 0]), scale_K, library)

    def native(
        self, block: Block, before_T: np.ndarray, after_T: np.ndarray, first: int, changed_WK: np.ndarray
    ) -> int:
        done: int = self.library.topics_draw(
            block.tokens_T.ctypes.data, block.is_wide, self.words.term_V.ctypes.data, block.ends_D.ctypes.data,
            len(block.ends_D), before_T.ctypes.data, after_T.ctypes.data, first, self.counts_WK.ctypes.data,
            self.scale_K.ctypes.data, changed_WK.ctypes.data, *changed_WK.shape, self.alpha, self.beta, self.key,
        )  # fmt: skip
        return done

    def numpy(self, word_T: np.ndarray, piece_T: np.ndarray, before_T: np.ndarray, first: int) -> np.ndarray:
        """The same, an array operation after the other."""
        if not len(word_T):
            return np.empty(0, np.uint16)
        topics = self.counts_WK.shape[1]
        row_WK = self._weights(self.counts_WK, self.scale_K)
        sums_WK = np.cumsum(row_WK, axis=1)
        old_T = before_T.astype(np.int64)
        row_T = row_WK[word_T, old_T]
        mine_T = self._weights(self.counts_WK[word_T, old_T] - 1, self.scale_K[old_T])
        rest_T = sums_WK[word_T, -1] - row_T + mine_T
        # Of each token, the topics of its document as they come, with their counts: N of them for all tokens.
        found, begun, counts = np.unique(piece_T * topics + old_T, return_index=True, return_counts=True)
        order = np.argsort(begun)
        found, counts = found[order], counts[order]
        sizes_D = np.bincount(found // topics, minlength=int(piece_T[-1]) + 1)
        sizes_T = sizes_D[piece_T]
        ends_T = np.cumsum(sizes_T)
        at_N = np.arange(ends_T[-1]) - np.repeat(ends_T - sizes_T - (np.cumsum(sizes_D) - sizes_D)[piece_T], sizes_T)
        topic_N, count_N = found[at_N] % topics, counts[at_N]
        own_N = topic_N == np.repeat(old_T, sizes_T)
        weight_N = np.where(
            own_N, (count_N - 1) * np.repeat(mine_T, sizes_T), count_N * row_WK[np.repeat(word_T, sizes_T), topic_N]
        )
        with np.errstate(over="ignore"):
            run_N = np.cumsum(weight_N)  # it may wrap around; differences are right
            run_N -= np.repeat(run_N[ends_T - sizes_T] - weight_N[ends_T - sizes_T], sizes_T)
        sum_T = run_N[ends_T - 1]
        bits_T = mixed(np.uint64(self.key) + places(first, len(word_T)))
        prior_T = (self.alpha * rest_T.astype(np.float64)).astype(np.int64)
        target_T = (upper(bits_T) * (sum_T + prior_T).astype(np.float64)).astype(np.int64)
        by_document_T = target_T < sum_T
        at_T = np.add.reduceat((run_N <= np.repeat(target_T, sizes_T)).astype(np.int64), ends_T - sizes_T)
        topic_T = topic_N[np.minimum(ends_T - sizes_T + at_T, len(topic_N) - 1)]
        target_T = (lower(bits_T) * rest_T.astype(np.float64)).astype(np.int64)
        target_T += np.where(target_T >= sums_WK[word_T, old_T] - row_T + mine_T, row_T - mine_T, 0)
        for some in np.array_split(np.flatnonzero(~by_document_T), 1 + len(word_T) // 4096):
            topic_T[some] = (sums_WK[word_T[some]] <= target_T[some, None]).sum(1)
        return topic_T.astype(np.uint16)

    def _weights(self, counts: np.ndarray, scale: np.ndarray) -> np.ndarray:
        weights: np.ndarray = ((counts.astype(np.float64) + self.beta) * scale).astype(np.int64) + 1
        return weights
