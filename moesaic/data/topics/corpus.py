"""Token shards as documents of words, block by block: what a topic model reads.

A word is a token of the tokenizer. Those in more than `common` of all documents say nothing about a topic, those in
fewer than `rare` documents nothing that could be learned: both are left out, and so is the end of a document. One
of more tokens than a block is read in pieces, each as a document, so that memory depends neither on the corpus nor on
the longest of its documents.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from moesaic.data.shards import Shards
from moesaic.errors import UserError
from moesaic.kernels.native import topics as native

BLOCK = 1 << 18  # tokens


@dataclass(frozen=True)
class Block:
    tokens_T: np.ndarray  # still on disk
    ends_D: np.ndarray  # where its documents end, among these tokens
    document: int  # number of the first
    number: int  # of pieces before: documents, longer ones in pieces
    is_last: bool  # whether the last document ends here

    @property
    def is_wide(self) -> bool:
        return self.tokens_T.dtype.itemsize == 4

    @property
    def piece_T(self) -> np.ndarray:
        return np.repeat(np.arange(len(self.ends_D)), np.diff(self.ends_D, prepend=0))


def blocks(data: Shards, size: int = BLOCK) -> Iterator[Block]:
    document = number = 0
    for shard in range(len(data.manifest["shards"])):
        tokens_T, ends = data.shard(shard)
        first = start = 0
        while first < len(ends):
            last = int(np.searchsorted(ends, start + size, side="right"))
            is_last = last > first
            stops_D = np.array(ends[first:last], np.int64) if is_last else np.array([start + size], np.int64)
            stop = int(stops_D[-1])
            yield Block(tokens_T[start:stop], stops_D - start, document + first, number, is_last)
            number += len(stops_D)
            first, start = last, stop
        document += len(ends)


@dataclass(frozen=True)
class Words:
    """`term_V`: the word that a token is, or -1; `token_W`: the token that a word is."""

    term_V: np.ndarray
    token_W: np.ndarray

    @property
    def count(self) -> int:
        return len(self.token_W)

    def of(self, block: Block) -> tuple[np.ndarray, np.ndarray]:
        """The words of a block, and the piece that each is in."""
        term_T = self.term_V[block.tokens_T]
        kept = term_T >= 0
        return term_T[kept], block.piece_T[kept]


def choose_words(data: Shards, common: float, rare: int, size: int = BLOCK) -> Words:
    frequency_V, pieces = _document_frequencies(data, size)
    kept_V = (frequency_V >= rare) & (frequency_V <= common * pieces)
    kept_V[data.manifest["end_of_document"]] = False
    token_W = np.flatnonzero(kept_V)
    if len(token_W) < 2:
        problem = f"of {pieces:,} documents too few share a word that is in at most {common:.0%} of them"
        raise UserError("data.topics", problem, "Raise common, lower rare, or give more documents.")
    term_V = np.full(data.vocabulary, -1, np.int32)
    term_V[token_W] = np.arange(len(token_W), dtype=np.int32)
    return Words(term_V, token_W)


def _document_frequencies(data: Shards, size: int) -> tuple[np.ndarray, int]:
    """In how many documents each token is, and how many documents there are."""
    frequency_V, seen_V = np.zeros(data.vocabulary, np.int64), np.full(data.vocabulary, -1, np.int64)
    library, pieces = native.library(), 0
    for block in blocks(data, size):
        pieces = block.number + len(block.ends_D)
        if library is not None:
            library.topics_frequencies(
                block.tokens_T.ctypes.data, block.is_wide, block.ends_D.ctypes.data, len(block.ends_D),
                frequency_V.ctypes.data, seen_V.ctypes.data, block.number,
            )  # fmt: skip
        else:
            pairs = np.unique(block.piece_T * data.vocabulary + block.tokens_T)
            frequency_V += np.bincount(pairs % data.vocabulary, minlength=data.vocabulary)
    return frequency_V, pieces
