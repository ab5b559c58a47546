"""The order within a pool: every document once in an epoch, any stretch without the one before it."""

from __future__ import annotations

import hashlib

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from moesaic.data.ordering import Pool, Table, cut, sorted_window, token_ranks

lengths_of = st.lists(st.integers(1, 20), min_size=1, max_size=20)


def make_pool(lengths: list[int], seed: int = 0, shuffled: bool = True) -> Pool:
    sizes = np.array(lengths)
    table = Table(np.cumsum(sizes) - sizes, sizes, np.zeros(len(sizes), np.uint16))
    return Pool("pool", np.arange(len(sizes)), table, seed, shuffled)


def tokens(pool: Pool, start: int, stop: int) -> list[int]:
    found = pool.span(start, stop)
    return [n for first, size in zip(found.starts.tolist(), found.lengths.tolist()) for n in range(first, first + size)]


@given(lengths_of, st.integers(0, 3))
def test_an_epoch_holds_every_token_once(lengths: list[int], epoch: int) -> None:
    pool = make_pool(lengths)
    found = tokens(pool, epoch * pool.tokens, (epoch + 1) * pool.tokens)
    assert sorted(found) == list(range(pool.tokens))


@given(lengths_of, st.integers(0, 200), st.integers(1, 200))
def test_a_stretch_is_a_part_of_the_line(lengths: list[int], start: int, size: int) -> None:
    pool = make_pool(lengths)
    assert tokens(pool, start, start + size) == tokens(pool, 0, start + size)[start:]
    assert (pool.span(start, start + size).lengths > 0).all()


@given(lengths_of, st.integers(1, 25))
def test_pieces_are_the_same_tokens_and_none_is_too_long(lengths: list[int], max_length: int) -> None:
    table = make_pool(lengths).table
    pieces, document = cut(table, max_length)
    assert pieces.lengths.max() <= max_length and (pieces.lengths > 0).all()
    found = [n for a, size in zip(pieces.starts.tolist(), pieces.lengths.tolist()) for n in range(a, a + size)]
    assert found == list(range(sum(lengths)))
    assert np.bincount(document, pieces.lengths, len(lengths)).tolist() == lengths
    assert len(pieces.lengths) == sum(-(-size // max_length) for size in lengths)


def test_epochs_and_seeds_differ_and_the_shuffle_is_even() -> None:
    pool = make_pool([1] * 1000)
    first, second, other = tokens(pool, 0, 1000), tokens(pool, 1000, 2000), tokens(make_pool([1] * 1000, 1), 0, 1000)
    assert first != second != other != first
    # Ranks of a fair shuffle are uncorrelated with the places: |r| < 4 / sqrt(1000).
    assert abs(np.corrcoef(first, range(1000))[0, 1]) < 0.13


def test_the_shuffle_never_changes() -> None:
    """A run that is resumed years later must see this very order: sorted by SplitMix64, here in plain Python."""
    x = int.from_bytes(hashlib.blake2b(b"5 pool 0", digest_size=8).digest(), "little")
    keys = []
    for _ in range(50):
        x = (x + 0x9E3779B97F4A7C15) % 2**64
        z = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        keys.append(z ^ (z >> 31))
    assert tokens(make_pool([1] * 50, seed=5), 0, 50) == sorted(range(50), key=keys.__getitem__)


@given(lengths_of, st.integers(0, 100), st.integers(1, 300))
def test_windows_are_sorted_sweeps_of_what_the_line_holds(lengths: list[int], start: int, size: int) -> None:
    pool = make_pool(lengths)
    difficulty = np.array([(n * 31) % 7 for n in range(len(lengths))], float)
    window = sorted_window(pool, start, start + size, difficulty)
    falls = int((np.diff(difficulty[window.documents]) < 0).sum())
    assert falls <= (start + size) // pool.tokens - start // pool.tokens
    assert size <= window.tokens <= size + 2 * max(lengths)
    # Neighbouring windows share no document of one epoch, but the one that lies in both.
    middle = pool.tokens // 2
    parts = [
        sorted_window(pool, low, high, difficulty) for low, high in ((0, middle), (middle, pool.tokens)) if low < high
    ]
    together = np.concatenate([part.documents for part in parts]).tolist()
    assert set(together) == set(range(len(lengths))) and len(together) <= len(lengths) + 1


def test_ranks_are_shares_of_tokens() -> None:
    ranks = token_ranks(np.array([3.0, 1.0, 2.0, 1.0]), np.array([10, 20, 30, 40]))
    assert ranks.tolist() == [0.9, 0.0, 0.6, 0.2]
