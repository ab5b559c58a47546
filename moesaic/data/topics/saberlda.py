"""Topics drawn from their conditional, all lanes of a vector at once (after SaberLDA, Li et al. 2017).

    data: {topics: {steps: 0}}

The conditional of a token's topic is (its document's count + alpha) x (its word's count + beta) / (words of the
topic), without the token itself. As in SaberLDA, blocks of documents look at counts of words that are renewed after
every few of them, and a draw is that of a warp: sixteen lanes sum up every sixteenth topic, sums go across the lanes,
and a target falls into a lane, then into a place of it. Unlike there, a document's own counts are those of this moment,
so that an iteration does nearly what one of collapsed Gibbs sampling does; and topics that a document does not have are
not left to a second sum: sixteen cost what one would.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from moesaic.data.topics.corpus import Block, Words
from moesaic.data.topics.draws import mixed, places, share

LANES = 16  # of native code: counts lie in memory with as many to spare behind them
TOGETHER = 512  # documents, without native code


@dataclass(frozen=True)
class SaberSweep:
    """What all tokens look at, until counts are renewed."""

    blocks: ClassVar[int] = 4  # that look at the same counts: more threads than these find no work

    words: Words
    counts_WK: np.ndarray
    alpha: np.float32
    beta: np.float32
    key: int
    inverse_K: np.ndarray  # of the words of each topic, smoothed
    library: Any = None

    @classmethod
    def of(
        cls,
        words: Words,
        counts_WK: np.ndarray,
        counts_K: np.ndarray,
        alpha: float,
        beta: float,
        keys_14: np.ndarray,
        library: Any,
        threads: int,
    ) -> SaberSweep:
        inverse_K = (1 / (counts_K + len(counts_WK) * beta)).astype(np.float32)
        return cls(words, counts_WK, np.float32(alpha), np.float32(beta), int(keys_14[0, 0]), inverse_K, library)

    def native(self, block: Block, before_T: np.ndarray, after_T: np.ndarray, first: int) -> int:
        done: int = self.library.topics_draw(
            block.tokens_T.ctypes.data, block.is_wide, self.words.term_V.ctypes.data, block.ends_D.ctypes.data,
            len(block.ends_D), before_T.ctypes.data, after_T.ctypes.data, first, self.counts_WK.ctypes.data,
            self.inverse_K.ctypes.data, self.counts_WK.shape[1], self.alpha, self.beta, self.key,
        )  # fmt: skip
        return done

    def numpy(self, word_T: np.ndarray, piece_T: np.ndarray, before_T: np.ndarray, first: int) -> np.ndarray:
        """The same, by the n-th tokens of some documents at a time."""
        topics = self.counts_WK.shape[1]
        sizes_D = np.bincount(piece_T)
        begins_D = np.cumsum(sizes_D) - sizes_D
        share_T = share(mixed(np.uint64(self.key) + places(first, len(word_T))))
        old_T = before_T.astype(np.int64)
        after_T = np.empty(len(word_T), np.uint16)
        for some_D in np.array_split(np.argsort(-sizes_D, kind="stable"), 1 + len(sizes_D) // TOGETHER):
            own_DK = np.zeros((len(some_D), topics), np.int32)
            for row_K, begin, size in zip(own_DK, begins_D[some_D], sizes_D[some_D]):
                row_K += np.bincount(old_T[begin : begin + size], minlength=topics).astype(np.int32)
            for n in range(sizes_D[some_D[0]] if len(some_D) else 0):
                at_A = begins_D[some_D[sizes_D[some_D] > n]] + n
                own_AK = own_DK[: len(at_A)]
                after_T[at_A] = self._drawn(own_AK, word_T[at_A], old_T[at_A], share_T[at_A])
        return after_T

    def _drawn(self, own_AK: np.ndarray, word_A: np.ndarray, old_A: np.ndarray, share_A: np.ndarray) -> np.ndarray:
        """A topic for one token of each document, whose counts go with it."""
        each = np.arange(len(word_A))
        own_AK[each, old_A] -= 1
        smoothed_AK = self.counts_WK[word_A].astype(np.float32) + self.beta
        others_A = smoothed_AK[each, old_A]
        part_AK = (own_AK.astype(np.float32) + self.alpha) * self.inverse_K
        part_AK[each, old_A] *= (others_A - np.float32(1)) / others_A
        topics = part_AK.shape[1]
        weight_AK = np.pad(part_AK * smoothed_AK, ((0, 0), (0, -topics % LANES)))
        sums_ARL = np.cumsum(weight_AK.reshape(len(each), -1, LANES), axis=1)
        ends_AL = sums_ARL[:, -1]
        for distance in (1, 2, 4, 8):
            ends_AL = ends_AL + np.pad(ends_AL, ((0, 0), (distance, 0)))[:, :LANES]
        target_A = share_A * ends_AL[:, -1]
        lane_A = (ends_AL[:, :-1] <= target_A[:, None]).sum(1)
        target_A = target_A - np.pad(ends_AL, ((0, 0), (1, 0)))[each, lane_A]
        row_A = (sums_ARL[each, :-1, lane_A] <= target_A[:, None]).sum(1)
        topic_A = row_A * LANES + lane_A
        topic_A = np.where(topic_A < topics, topic_A, old_A)
        own_AK[each, topic_A] += 1
        return topic_A
