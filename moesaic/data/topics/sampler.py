"""Latent Dirichlet allocation over token shards: what is sampled lies on disk, the counts of words in memory.

    sampler = Sampler(data, choose_words(data, common=0.25, rare=3), folder, topics=32)
    for iteration in sampler.run(100): ...
    sampler.counts_WK

Counts are those of some blocks before (delayed), so the order of tokens is free: blocks of documents pass one after the
other, each in the order of its words (SaberLDA's partition by document, word-major inside). How a token's topic is
drawn is `saberlda`, where counts are renewed after every few blocks, or with `steps` `warplda`, after every iteration.

On disk lie the topics before and after an iteration, 2 bytes each a token, memory-mapped. Memory holds the counts of
words and a block per thread. Draws are hashes of seed, iteration and position: any number of threads, a killed run that
resumes, and NumPy in place of C give the same bits.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from math import lgamma
from pathlib import Path

import numpy as np
import torch

from moesaic import atomic
from moesaic.data.shards import Shards
from moesaic.data.topics.corpus import BLOCK, Block, Words, blocks
from moesaic.data.topics.draws import keys, mixed, places, scaled
from moesaic.data.topics.saberlda import LANES, SaberSweep
from moesaic.data.topics.warplda import UNIT, WarpSweep
from moesaic.errors import UserError
from moesaic.json_files import read_json
from moesaic.kernels import hardware
from moesaic.kernels.native import topics as native

MAX_TOPICS = 4096
PARTS, LEAST = 32, 1 << 10  # blocks that a small corpus is read in, and tokens of one at least
STATE = "state.json"


class Sampler:
    def __init__(
        self,
        data: Shards,
        words: Words,
        folder: Path,
        *,
        topics: int,
        alpha: float = 0.1,
        beta: float = 0.01,
        steps: int = 0,
        seed: int = 0,
        block: int | None = None,
        threads: int | None = None,
        compiled: bool = True,
    ) -> None:
        if not 2 <= topics <= MAX_TOPICS:
            raise UserError("data.topics", f"{topics} topics", f"Ask for 2 to {MAX_TOPICS}.")
        self.data, self.words, self._work, self.topics = data, words, folder / "work", topics
        self.steps, self.seed = steps, seed
        self.block = block or min(BLOCK, max(LEAST, data.tokens // PARTS))
        self.alpha, self.beta = alpha, max(1, round(beta * UNIT)) / UNIT
        self.threads = threads or hardware.threads()
        self.library = native.library() if compiled else None
        self.positions = np.cumsum([0, *(words.of(block)[0].size for block in self.blocks())])
        self.size = int(self.positions[-1])
        self._work.mkdir(parents=True, exist_ok=True)
        self.iteration = self._begin()
        self.counts_WK = self._counted()
        self.counts_K = self.counts_WK.sum(0, dtype=np.int64)

    def blocks(self) -> Iterator[Block]:
        return blocks(self.data, self.block)

    # -- files

    def _file(self, iteration: int) -> Path:
        return self._work / f"topics.{iteration % 2}"

    def topics_of(self, iteration: int, mode: str = "r") -> np.memmap:
        return np.memmap(self._file(iteration), np.dtype("<u2"), mode, shape=(self.size,))  # type: ignore[call-overload]

    def _request(self) -> dict[str, object]:
        chosen = hashlib.blake2b(self.words.token_W.astype("<i8").tobytes(), digest_size=8).hexdigest()
        settings = [self.topics, self.alpha, self.beta, self.steps, self.seed, self.block]
        return {"data": self.data.fingerprint, "words": chosen, "settings": settings}

    def _begin(self) -> int:
        """The iteration to go on from; a new run draws every token's topic."""
        state = self._work / STATE
        found = read_json(state) if state.is_file() else {}
        if found.get("request") == self._request():
            return int(found["iteration"])
        state.unlink(missing_ok=True)
        key = keys(self.seed, 0, 1)[0, 0]
        begun_T = self.topics_of(0, "w+")
        for first, last in zip(self.positions, self.positions[1:]):
            begun_T[first:last] = scaled(mixed(key + places(first, last - first)), self.topics)
        begun_T.flush()
        self._save(0)
        return 0

    def _save(self, iteration: int) -> None:
        atomic.write_json(self._work / STATE, {"request": self._request(), "iteration": iteration})

    def _counted(self) -> np.ndarray:
        cells = self.words.count * self.topics
        counts_WK = np.zeros(cells + LANES, np.int32)[:cells].reshape(
            -1, self.topics
        )  # native code reads whole vectors
        topic_T = self.topics_of(self.iteration)
        for number, block in enumerate(self.blocks()):
            mine_T = topic_T[self.positions[number] : self.positions[number + 1]]
            np.add.at(counts_WK, (self.words.of(block)[0], mine_T), 1)
        return counts_WK

    # -- sampling

    def run(self, iterations: int) -> Iterator[int]:
        """Up to so many in all; each as it is done."""
        while self.iteration < iterations:
            self.iterate()
            yield self.iteration

    def iterate(self) -> None:
        drawn = keys(self.seed, self.iteration + 1, max(1, self.steps))
        before_T, after_T = self.topics_of(self.iteration), self.topics_of(self.iteration + 1, "w+")

        def one(sweep: SaberSweep | WarpSweep, block: Block, place: slice) -> None:
            if sweep.library is None:
                after_T[place] = sweep.numpy(*self.words.of(block), before_T[place], place.start)
            elif sweep.native(block, before_T[place], after_T[place], place.start) != place.stop - place.start:
                raise MemoryError("a block of tokens did not fit")

        kind: type[SaberSweep | WarpSweep] = WarpSweep if self.steps else SaberSweep
        places_of = map(slice, self.positions.tolist(), self.positions[1:].tolist())
        waiting = zip(self.blocks(), places_of, strict=True)
        with ThreadPoolExecutor(1 if self.library is None else self.threads) as pool:
            while some := list(islice(waiting, kind.blocks)):
                sweep = kind.of(
                    self.words, self.counts_WK, self.counts_K, self.alpha, self.beta, drawn, self.library, self.threads
                )
                list(pool.map(partial(one, sweep), *zip(*some)))
                for block, place in some:
                    self._count(block, before_T[place], after_T[place])
        self.iteration += 1
        self._save(self.iteration)

    def _count(self, block: Block, before_T: np.ndarray, after_T: np.ndarray) -> None:
        """What has changed; by one thread, so that no count has to be locked."""
        if self.library is None:
            word_T = self.words.of(block)[0]
            np.add.at(self.counts_WK, (word_T, before_T), -1)
            np.add.at(self.counts_WK, (word_T, after_T), 1)
            self.counts_K += np.bincount(after_T, minlength=self.topics) - np.bincount(before_T, minlength=self.topics)
        else:
            self.library.topics_count(
                block.tokens_T.ctypes.data, block.is_wide, self.words.term_V.ctypes.data, block.ends_D.ctypes.data,
                len(block.ends_D), before_T.ctypes.data, after_T.ctypes.data, self.counts_WK.ctypes.data,
                self.counts_K.ctypes.data, self.topics,
            )  # fmt: skip

    # -- what was found

    def remove_files(self) -> None:
        shutil.rmtree(self._work, ignore_errors=True)

    def by_document(self) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """For runs of documents: number of the first, the topic most of its words have (-1: it has none), and what
        share of them has it."""
        topic_T = self.topics_of(self.iteration)
        carried_K = np.zeros(self.topics, np.int64)  # of the earlier pieces of a document
        for number, block in enumerate(self.blocks()):
            piece_T = self.words.of(block)[1]
            mine_T = topic_T[self.positions[number] : self.positions[number + 1]]
            if not block.is_last:
                carried_K += np.bincount(mine_T, minlength=self.topics)
                continue
            found, counts = np.unique(piece_T * self.topics + mine_T, return_counts=True)
            best_D, topic_D = np.zeros(len(block.ends_D)), np.full(len(block.ends_D), -1)
            sizes_D = np.bincount(piece_T, minlength=len(block.ends_D))
            order = np.lexsort((-found, counts))  # the last one of a document wins: the most, the lowest topic
            best_D[found[order] // self.topics] = counts[order]
            topic_D[found[order] // self.topics] = found[order] % self.topics
            if carried_K.any():
                carried_K += np.bincount(mine_T[piece_T == 0], minlength=self.topics)
                best_D[0], topic_D[0], sizes_D[0] = carried_K.max(), carried_K.argmax(), carried_K.sum()
                carried_K[:] = 0
            yield block.document, topic_D, best_D / np.maximum(sizes_D, 1)

    def log_likelihood(self) -> float:
        """Of words and topics together, for each word."""
        topic_T, total = self.topics_of(self.iteration), 0.0
        for number, block in enumerate(self.blocks()):
            mine_T = topic_T[self.positions[number] : self.positions[number + 1]]
            piece_T = self.words.of(block)[1]
            total += documents_likelihood(piece_T, mine_T, self.topics, self.alpha)
        return (total + words_likelihood(self.counts_WK, self.beta)) / self.size


def words_likelihood(counts_WK: np.ndarray, beta: float) -> float:
    """log p(words | topics), the words of each topic integrated out."""
    words, topics = counts_WK.shape
    total = topics * lgamma(words * beta) - log_gamma(counts_WK.sum(0, dtype=np.int64) + words * beta).sum()
    positive = counts_WK[counts_WK > 0]
    return float(total + (log_gamma(positive + beta) - lgamma(beta)).sum())


def documents_likelihood(document_T: np.ndarray, topic_T: np.ndarray, topics: int, alpha: float) -> float:
    sizes = np.bincount(document_T)
    sizes = sizes[sizes > 0]
    counts = np.unique(document_T * topics + topic_T, return_counts=True)[1]
    total = len(sizes) * lgamma(topics * alpha) - log_gamma(sizes + topics * alpha).sum()
    return float(total + (log_gamma(counts + alpha) - lgamma(alpha)).sum())


def log_gamma(numbers: np.ndarray) -> np.ndarray:
    """Of torch, which is loaded anyway: every `moesaic train` would wait for scipy's, which takes most of a second."""
    return torch.lgamma(torch.from_numpy(numbers.astype(np.float64))).numpy()
