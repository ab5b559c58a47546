"""Who makes room for whom: the least load, never what is pinned, and never more than the slots."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moesaic.errors import UserError
from moesaic.serve.offload.expert_cache import ExpertCache
from moesaic.serve.offload.slot_budget import ExpertShape, divide


def use(cache: ExpertCache, expert: int) -> bool:
    """Whether it was there."""
    cache.tick()
    cache.want((0, expert))
    if cache.slot((0, expert)) is not None:
        return True
    assert cache.place((0, expert)) is not None
    return False


def test_what_is_wanted_often_stays() -> None:
    cache = ExpertCache(2)
    for expert in [7, 7, 7, 1, 2, 3, 4, 5]:
        use(cache, expert)
    assert use(cache, 7)
    assert use(cache, 5)
    assert not use(cache, 1)


def test_load_of_long_ago_counts_little() -> None:
    cache = ExpertCache(2, half_life=4)
    for expert in [7] * 6 + [1, 2] * 20:
        use(cache, expert)
    assert cache.slot((0, 7)) is None
    assert cache.load((0, 7)) > cache.load((0, 8))  # but is not forgotten


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=60))
def test_slots_hold_what_they_are_said_to_and_pinned_ones_keep_it(slots: int, wishes: list[tuple[int, bool]]) -> None:
    cache = ExpertCache(slots)
    pinned: dict[int, int] = {}
    for expert, pin in wishes:
        key = (0, expert)
        slot = cache.slot(key)
        if slot is None and (slot := cache.place(key)) is None:
            assert len(pinned) == slots == slots - cache.available
            cache.unpin(pinned.pop(next(iter(pinned))))
            continue
        assert cache.keys[slot] == key
        if pin and expert not in pinned:
            cache.pin(slot)
            pinned[expert] = slot
        assert all(cache.slot((0, held)) == place for held, place in pinned.items())
        held = [key for key in cache.keys if key is not None]
        assert max(Counter(held).values()) == 1 and len(held) <= slots


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(2, 64), st.integers(1, 50), st.integers(1, 2)), min_size=1, max_size=8),
    st.floats(0.001, 1.3),
)
def test_never_more_bytes_than_given_and_a_tokens_experts(layers: list[tuple[int, int, int]], share: float) -> None:
    shapes = [ExpertShape(count, size, per_token, size) for count, size, per_token in layers]
    budget = int(share * sum(shape.count * shape.bytes for shape in shapes))
    try:
        pools = divide(budget, shapes)
    except UserError:
        kinds = {(shape.kind, shape.bytes) for shape in shapes}
        least = sum(max(s.per_token for s in shapes if s.bytes == size) * size for _, size in kinds)
        assert budget < least
        return
    assert sorted(number for pool in pools for number in pool.layers) == list(range(len(shapes)))
    assert sum(pool.slots * shapes[pool.layers[0]].bytes for pool in pools) <= budget
    for pool in pools:
        assert len({shapes[number].bytes for number in pool.layers}) == 1
        assert all(pool.slots >= shapes[number].per_token for number in pool.layers)
        assert len(pool.layers) > 1 or pool.slots <= max(shapes[n].count for n in pool.layers) or share < 1


def test_a_share_of_everything() -> None:
    shapes = [ExpertShape(8, 10, 2)] * 3
    assert [pool.slots for pool in divide(240, shapes)] == [8, 8, 8]
    assert [pool.slots for pool in divide(120, shapes)] == [4, 4, 4]
    assert [pool.slots for pool in divide(139, shapes)] == [5, 4, 4]
    assert [(pool.slots, pool.layers) for pool in divide(45, shapes)] == [(4, (0, 1, 2))]
    with pytest.raises(UserError, match="do not hold the experts of one token"):
        divide(19, shapes)
