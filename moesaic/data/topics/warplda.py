"""WarpLDA (Chen et al. 2016): Metropolis-Hastings steps, O(1) for a token whatever the topics and its document.

    data: {topics: {steps: 2}}

A token's topic moves twice in an iteration: to one that is drawn as its word has them (by an alias table) and accepted
by its document's counts, then to one that is drawn as its document has them (the topic of another of its tokens) and
accepted by its word's counts; with `steps` of each. A token's own count is left out of both, as in collapsed Gibbs
sampling; that of all words of its topic is not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from moesaic.data.topics.corpus import Block, Words
from moesaic.data.topics.draws import GOLDEN, mixed, places, scaled, share

UNIT = 1 << 20  # a count of one, as a weight of an alias table
TRIES = 4  # draws until one is another topic than the token's own, where that is too likely by its own count


@dataclass(frozen=True)
class WarpSweep:
    """What all tokens look at, until counts are renewed."""

    blocks: ClassVar[int] = 64  # that look at the same counts: alias tables are made for all of them

    words: Words
    counts_WK: np.ndarray
    alpha: float
    beta: float
    keys_M4: np.ndarray
    alias_WK: np.ndarray
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
        keys_M4: np.ndarray,
        library: Any,
        threads: int,
    ) -> WarpSweep:
        inverse_K = (1 / (counts_K + len(counts_WK) * beta)).astype(np.float32)
        smoothing = round(beta * UNIT)
        if library is None:
            alias_WK = alias_table(counts_WK, smoothing)
        else:
            alias_WK = np.empty(counts_WK.shape, np.uint32)
            library.topics_alias(counts_WK.ctypes.data, alias_WK.ctypes.data, *alias_WK.shape, smoothing, threads)
        return cls(words, counts_WK, alpha, beta, keys_M4, alias_WK, inverse_K, library)

    @property
    def topics(self) -> int:
        return self.counts_WK.shape[1]

    def native(self, block: Block, before_T: np.ndarray, after_T: np.ndarray, first: int) -> int:
        done: int = self.library.topics_sweep(
            block.tokens_T.ctypes.data, block.is_wide, self.words.term_V.ctypes.data, block.ends_D.ctypes.data,
            len(block.ends_D), before_T.ctypes.data, after_T.ctypes.data, first, self.counts_WK.ctypes.data,
            self.alias_WK.ctypes.data, self.inverse_K.ctypes.data, *self.counts_WK.shape,
            self.alpha, self.alpha * self.topics, self.beta, len(self.keys_M4), self.keys_M4.ctypes.data,
        )  # fmt: skip
        return done

    def numpy(self, word_T: np.ndarray, piece_T: np.ndarray, before_T: np.ndarray, first: int) -> np.ndarray:
        """The same, an array operation after the other."""
        place_T = places(first, len(word_T))
        alpha, beta = np.float32(self.alpha), np.float32(self.beta)
        proposed_M = [self._by_word(word_T, before_T, keys[0] + place_T) for keys in self.keys_M4]
        own = _Counts(piece_T * self.topics + before_T)
        topic_T = np.array(before_T)
        for keys, other_T in zip(self.keys_M4, proposed_M):

            def chance_T(topic_T: np.ndarray) -> np.ndarray:
                counts_T = own.of(piece_T * self.topics + topic_T) - (topic_T == before_T)
                return (counts_T.astype(np.float32) + alpha) * self.inverse_K[topic_T]

            accepted_T = share(mixed(keys[1] + place_T)) * chance_T(topic_T) < chance_T(other_T)
            topic_T = np.where(accepted_T, other_T, topic_T)
        proposed_M = [self._by_document(piece_T, topic_T, mixed(keys[2] + place_T)) for keys in self.keys_M4]
        for keys, other_T in zip(self.keys_M4, proposed_M):

            def chance_T(topic_T: np.ndarray) -> np.ndarray:
                counts_T = self.counts_WK[word_T, topic_T] - (topic_T == before_T)
                return (counts_T.astype(np.float32) + beta) * self.inverse_K[topic_T]

            accepted_T = share(mixed(keys[3] + place_T)) * chance_T(topic_T) < chance_T(other_T)
            topic_T = np.where(accepted_T, other_T, topic_T)
        return topic_T

    def _by_word(self, word_T: np.ndarray, before_T: np.ndarray, x_T: np.ndarray) -> np.ndarray:
        bits_T, topic_T, beta = mixed(x_T), np.array(before_T), np.float32(self.beta)
        left_T = np.ones(len(word_T), bool)
        for _ in range(TRIES):
            at_T = scaled(bits_T, self.topics)
            cell_T = self.alias_WK[word_T, at_T]
            own = ((bits_T >> np.uint64(32)) & np.uint64(0xFFFF)).astype(np.uint32) < cell_T >> np.uint32(16)
            topic_T = np.where(left_T, np.where(own, at_T, cell_T & np.uint32(0xFFFF)), topic_T).astype(np.uint16)
            counts_T = self.counts_WK[word_T, topic_T].astype(np.float32)
            stays_T = (bits_T >> np.uint64(48)).astype(np.float32) * np.float32(2**-16) * (counts_T + beta) >= 1
            left_T &= (topic_T == before_T) & ~stays_T
            bits_T = mixed(bits_T + GOLDEN)
        return topic_T

    def _by_document(self, piece_T: np.ndarray, topic_T: np.ndarray, bits_T: np.ndarray) -> np.ndarray:
        sizes = np.bincount(piece_T)
        begin_T = (np.cumsum(sizes) - sizes)[piece_T]
        others_T = (sizes[piece_T] - 1).astype(np.float64)
        place_T = (bits_T >> np.uint64(32)).astype(np.float64) * 2**-32 * (others_T + self.alpha * self.topics)
        other_T = place_T.astype(np.int64)
        other_T += begin_T + (other_T >= np.arange(len(piece_T)) - begin_T)
        another_T = topic_T[np.minimum(other_T, len(topic_T) - 1)]
        return np.where(place_T < others_T, another_T, scaled(bits_T, self.topics)).astype(np.uint16)


def alias_table(counts_WK: np.ndarray, smoothing: int) -> np.ndarray:
    """K cells of equal probability for each word, each of two topics: its own below the upper 16 bits, else the lower
    16. Topics above the mean fill up the cells of those below it, one after the other; in all words at once, in whole
    numbers, so that nothing is left over at the end."""
    words, topics = counts_WK.shape
    weights_WK = (counts_WK.astype(np.int64) * UNIT + smoothing) * topics
    total_W = weights_WK.sum(1) // topics
    heavy_WK = weights_WK > total_W[:, None]
    cells_WK = np.tile(np.uint32(0xFFFF0000) | np.arange(topics, dtype=np.uint32), (words, 1))
    # The next light and heavy topic from every one on; `topics` where there is none.
    next_light_WK, next_heavy_WK = _next(~heavy_WK), _next(heavy_WK)
    light_W, heavy_W = next_light_WK[:, 0], next_heavy_WK[:, 0]
    padded_WK = np.pad(weights_WK, ((0, 0), (0, 1)))
    rest_W = padded_WK[np.arange(words), heavy_W]
    rows = np.flatnonzero(heavy_W < topics)
    while len(rows):
        light, heavy, rest, total = light_W[rows], heavy_W[rows], rest_W[rows], total_W[rows]
        gives = rest > total
        after = next_heavy_WK[rows, heavy + 1]
        at, to = np.where(gives, light, heavy), np.where(gives, heavy, after)
        mine = np.where(gives, padded_WK[rows, np.minimum(light, topics)], rest)
        fills = (mine < total) & (to < topics)
        parts = np.where(fills, mine / total * 65536.0, 0).astype(np.uint32)
        cells_WK[rows[fills], at[fills]] = parts[fills] << np.uint32(16) | to[fills].astype(np.uint32)
        rest_W[rows] = np.where(gives, rest - (total - mine), padded_WK[rows, after] - (total - rest))
        light_W[rows] = np.where(gives, next_light_WK[rows, np.minimum(light + 1, topics)], light)
        heavy_W[rows] = np.where(gives, heavy, after)
        rows = rows[heavy_W[rows] < topics]
    return cells_WK


def _next(marked_WK: np.ndarray) -> np.ndarray:
    """The first marked topic from each one on."""
    words, topics = marked_WK.shape
    places = np.where(np.pad(marked_WK, ((0, 0), (0, 2))), np.arange(topics + 2), topics)
    return np.minimum.accumulate(places[:, ::-1], axis=1)[:, ::-1]


class _Counts:
    """How often each key is there."""

    def __init__(self, keys_T: np.ndarray) -> None:
        self.keys, self.counts = np.unique(keys_T, return_counts=True)

    def of(self, keys_T: np.ndarray) -> np.ndarray:
        at = np.minimum(np.searchsorted(self.keys, keys_T), len(self.keys) - 1)
        return np.where(self.keys[at] == keys_T, self.counts[at], 0)
