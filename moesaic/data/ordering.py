"""The order of documents within a pool: reshuffled in every epoch, or sorted within a window.

A pool is a set of documents as one endless sequence of tokens, any span of which can be computed directly, so nothing
has to be replayed to resume from the middle. The shuffle is defined here, by a hash of each document's place
in the pool, and not by a library's random numbers, which may change with its version. Memory: 16 bytes for each
document of a pool and each epoch at hand (two at most).

Documents are first split (`cut`) into pieces of at most the sequence length; the pieces are then the documents here.
Otherwise one very long document would fill many consecutive batches.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class TokenSpans:
    """Consecutive parts of documents: first token among all tokens, length, and domain of each."""

    starts: np.ndarray
    lengths: np.ndarray
    domains: np.ndarray


@dataclass(frozen=True)
class Table:
    """First token, length and domain of every document."""

    starts: np.ndarray
    lengths: np.ndarray
    domain: np.ndarray


def cut(table: Table, max_length: int) -> tuple[Table, np.ndarray]:
    """The same tokens with documents split into pieces of at most `max_length`, and the document each piece is from."""
    pieces = -(-table.lengths // max_length)
    document = np.repeat(np.arange(len(pieces)), pieces)
    before = (np.arange(len(document)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * max_length
    lengths = np.minimum(table.lengths[document] - before, max_length)
    return Table(table.starts[document] + before, lengths, table.domain[document]), document


@dataclass
class Pool:
    """`documents` in an order of their own in each epoch, decided by `key` and `seed`; or as they are, if not
    `shuffled`."""

    key: str
    documents: np.ndarray
    table: Table
    seed: int
    shuffled: bool = True
    tokens: int = field(init=False)
    _epochs: dict[int, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        self.tokens = int(self.table.lengths[self.documents].sum())
        assert self.tokens > 0, f"pool {self.key} is empty"

    def span(self, start: int, stop: int) -> TokenSpans:
        """Token `start` to token `stop` of the pool's sequence."""
        parts = []
        while start < stop:
            epoch, first = divmod(start, self.tokens)
            last = min(self.tokens, first + stop - start)
            parts.append(self._within(epoch, first, last))
            start += last - first
        return TokenSpans(*(np.concatenate(arrays) for arrays in zip(*parts)))

    def epoch(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """The documents in their order, and the token at which each ends."""
        number = number if self.shuffled else 0
        if number not in self._epochs:
            if len(self._epochs) > 1:
                del self._epochs[min(self._epochs)]
            order = self.documents
            if self.shuffled:
                order = order[np.argsort(_hashes(len(order), self.seed, f"{self.key} {number}"), kind="stable")]
            self._epochs[number] = order, np.cumsum(self.table.lengths[order])
        return self._epochs[number]

    def _within(self, epoch: int, first: int, last: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        order, ends = self.epoch(epoch)
        low = int(np.searchsorted(ends, first, side="right"))
        high = int(np.searchsorted(ends, last, side="left")) + 1
        documents = order[low:high]
        starts, lengths = self.table.starts[documents], self.table.lengths[documents]
        before = first - int(ends[low] - lengths[0])
        starts[0] += before
        lengths[0] -= before
        lengths[-1] -= int(ends[high - 1]) - last
        return starts, lengths, self.table.domain[documents]


def sorted_window(pool: Pool, start: int, stop: int, difficulty: np.ndarray) -> Pool:
    """The documents between two tokens of a pool's sequence, the easiest first; one sweep for each epoch.

    Being a window of the shuffled sequence, it is a fair sample of the pool however short it is: sorting the pool and
    taking its start would give the worst documents only. Documents that reach over an end are taken whole, so that the
    window never wraps around to its worst.
    """
    parts = []
    for number in range(start // pool.tokens, -(-stop // pool.tokens)):
        order, ends = pool.epoch(number)
        begins = number * pool.tokens + ends - pool.table.lengths[order]
        chosen = order[(begins + pool.table.lengths[order] > start) & (begins < stop)]
        parts.append(chosen[np.argsort(difficulty[chosen], kind="stable")])
    return Pool(f"{pool.key} sorted {start}", np.concatenate(parts), pool.table, pool.seed, shuffled=False)


def token_ranks(values: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """For each document the share of all tokens that lies in documents of lower value (ties: earlier ones first)."""
    order = np.argsort(values, kind="stable")
    ends = np.cumsum(lengths[order])
    ranks = np.empty(len(values))
    ranks[order] = (ends - lengths[order]) / max(int(ends[-1]), 1) if len(ends) else 0.0
    return ranks


def _hashes(count: int, seed: int, key: str) -> np.ndarray:
    """A number of 64 bits for each of 0 to count - 1 (SplitMix64's mixing)."""
    start = int.from_bytes(hashlib.blake2b(f"{seed} {key}".encode(), digest_size=8).digest(), "little")
    with np.errstate(over="ignore"):
        x = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(start)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
