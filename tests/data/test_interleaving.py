"""Interleaving: exact counts, fixed ratios, evenly spread."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from moesaic.data.interleaving import Interleaving

weights = st.lists(st.floats(0, 10), min_size=1, max_size=6).filter(lambda values: sum(values) > 0.01)


@given(weights, st.integers(0, 2**64 - 1), st.integers(0, 500), st.integers(0, 500))
def test_counts_are_those_of_the_slots(weights: list[float], offset: int, first: int, count: int) -> None:
    interleaving = Interleaving(weights, offset)
    owners = interleaving.owners(0, first + count)
    assert interleaving.owners(first, count).tolist() == owners[first:].tolist()
    assert interleaving.counts(first + count) == np.bincount(owners, minlength=len(weights)).tolist()
    assert all(weight > 0 for weight, n in zip(weights, interleaving.counts(first + count)) if n)


@given(weights, st.integers(0, 2**64 - 1), st.integers(1, 10**12))
def test_ratios_are_kept_to_a_few_slots_however_far(weights: list[float], offset: int, slots: int) -> None:
    counts = Interleaving(weights, offset).counts(slots)
    assert sum(counts) == slots
    for count, weight in zip(counts, weights):
        assert abs(count - slots * weight / sum(weights)) < 40 + slots * 1e-12


def test_things_are_spread_evenly() -> None:
    owners = Interleaving([0.7, 0.3]).owners(0, 10_000)
    gaps = np.diff(np.flatnonzero(owners == 1))
    assert gaps.min() >= 2 and gaps.max() <= 5
