"""Slots for experts from measured loads: nothing is lost, nothing gets worse, little moves."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from moesaic.errors import UserError
from moesaic.parallel.experts.placement import (
    SlotPlan,
    after,
    imbalance,
    moves,
    plan_slots,
    rebalance,
    without_rank,
)

# experts, ranks, slots per rank, nodes, groups of experts
SIZES = [
    (8, 2, 4, 1, 0),
    (8, 2, 5, 1, 0),
    (8, 4, 3, 2, 0),
    (6, 4, 2, 1, 0),
    (64, 8, 10, 2, 8),
    (60, 8, 9, 4, 0),
    (7, 3, 3, 1, 0),
    (4, 4, 4, 1, 0),
    (2, 4, 1, 1, 0),
]


def skewed(count: int, seed: int) -> list[float]:
    """As routers are: a few experts with most of the tokens, some with none."""
    chance = random.Random(seed)
    loads = [1000.0 / (place + 1) ** chance.choice([0.5, 1.0, 1.5]) for place in range(count)]
    loads[-1] = 0.0
    chance.shuffle(loads)
    return loads


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("seed", range(6))
def test_every_expert_has_a_slot_and_every_rank_as_many(sizes: tuple[int, ...], seed: int) -> None:
    experts, ranks, slots, nodes, groups = sizes
    loads = skewed(experts, seed)
    for plan in (plan_slots(loads, ranks, slots, nodes, groups), SlotPlan.even(experts, ranks, slots)):
        assert [len(own) for own in plan.slots] == [slots] * ranks
        assert sorted(plan.copies()) == list(range(experts))
        if slots <= experts and ranks * slots <= experts * ranks:
            assert all(len(set(own)) == slots for own in plan.slots), "two copies on a rank serve nobody"


@pytest.mark.parametrize("seed", range(10))
def test_copies_of_hot_experts_balance_what_no_order_can(seed: int) -> None:
    loads = skewed(32, seed)
    loads[5] = sum(loads)  # half of all tokens want one expert
    alone = plan_slots(loads, 8, 4)
    copied = plan_slots(loads, 8, 6)
    assert alone.imbalance(loads) >= 4.0  # of eight ranks one has half of the load
    assert copied.imbalance(loads) < 1.15
    assert copied.copies()[5] == max(copied.copies().values()) > 1
    assert sum(copied.loads(loads)) == pytest.approx(sum(loads))


def test_nodes_keep_their_experts() -> None:
    """With groups of experts: all copies of a group on one node, as group-limited routing wants it."""
    loads = skewed(32, 3)
    plan = plan_slots(loads, 8, 6, nodes=2, groups=8)
    for group in range(8):
        members = range(group * 4, group * 4 + 4)
        assert len({rank // 4 for expert in members for rank in plan.holders(expert)}) == 1
    assert plan.imbalance(loads) <= SlotPlan.even(32, 8, 6).imbalance(loads)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("seed", range(6))
def test_a_plan_in_use_never_gets_worse_and_moves_are_what_changes(sizes: tuple[int, ...], seed: int) -> None:
    experts, ranks, slots, nodes, groups = sizes
    present = plan_slots(skewed(experts, seed), ranks, slots, nodes, groups)
    loads = skewed(experts, seed + 100)
    change = rebalance(present, loads, nodes, groups)
    assert change.before == pytest.approx(present.imbalance(loads))
    assert change.after == pytest.approx(change.plan.imbalance(loads))
    assert change.after <= change.before
    assert [len(own) for own in change.plan.slots] == [slots] * ranks
    assert sorted(change.plan.copies()) == list(range(experts))
    assert after(present, change.moves) == change.plan
    differing = sum(
        now != then
        for old, new in zip(present.slots, change.plan.slots, strict=True)
        for now, then in zip(old, new, strict=True)
    )
    assert len(change.moves) == differing
    for move in change.moves:
        assert move.source is not None and move.expert in present.slots[move.source]


@pytest.mark.parametrize("seed", range(8))
def test_a_little_drift_moves_little(seed: int) -> None:
    """Loads that change by some percent: mended, not packed anew, and as good as packed anew."""
    chance, loads = random.Random(seed), skewed(64, seed)
    present = plan_slots(loads, 8, 10)
    drifted = [load * chance.uniform(0.9, 1.1) for load in loads]
    change, fresh = rebalance(present, drifted), plan_slots(drifted, 8, 10)
    assert change.after <= fresh.imbalance(drifted) + 0.021
    packed_anew = sum((Counter(new) - Counter(old)).total() for new, old in zip(fresh.slots, present.slots))
    assert len(change.moves) <= 6 < packed_anew


def test_nothing_moves_without_need() -> None:
    loads = [1.0] * 16
    assert rebalance(SlotPlan.even(16, 4), loads).moves == ()
    assert rebalance(SlotPlan.even(16, 4), [0.0] * 16).moves == ()


def test_no_more_moves_than_allowed() -> None:
    loads = [100.0, 90.0, 80.0, 70.0] + [1.0] * 12
    present = SlotPlan.even(16, 4, 5)
    most = [rebalance(present, loads, most_moves=count) for count in range(5)]
    assert [len(change.moves) <= count for count, change in enumerate(most)] == [True] * 5
    assert most[0].moves == () and most[-1].after < most[1].after < most[0].after


def test_moves_with_two_copies_on_one_rank() -> None:
    present, wanted = SlotPlan(((0, 1, 1), (2, 3, 0))), SlotPlan(((0, 1, 2), (2, 3, 1)))
    changes = moves(present, wanted)
    assert [(move.rank, move.slot, move.expert) for move in changes] == [(0, 2, 2), (1, 2, 1)]
    assert [set(own) for own in after(present, changes).slots] == [{0, 1, 2}, {1, 2, 3}]


def test_even_is_the_usual_order() -> None:
    assert SlotPlan.even(8, 4).slots == ((0, 1), (2, 3), (4, 5), (6, 7))
    loads = skewed(8, 1)
    assert SlotPlan.even(8, 4).imbalance(loads) == pytest.approx(imbalance(loads, 4))
    assert SlotPlan.even(8, 4, 3).slots == ((0, 1, 2), (2, 3, 4), (4, 5, 6), (6, 7, 0))
    with pytest.raises(UserError, match="do not hold 9 experts"):
        SlotPlan.even(9, 4, 2)


def test_the_others_take_what_only_a_lost_rank_held() -> None:
    present = SlotPlan(((0, 1, 2), (2, 3, 4), (4, 5, 0)))
    left = without_rank(present, 1)
    assert left.slots == ((0, 1, 2, 3), (), (4, 5, 0))
    again = without_rank(left, 0)
    assert sorted(again.slots[2]) == list(range(6)) and again.slots[:2] == ((), ())
    with pytest.raises(UserError, match="no rank"):
        without_rank(again, 2)
