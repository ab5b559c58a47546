"""Where experts should lie, from measured loads: an order of them, or slots with copies of those that most tokens want.

    plan = plan_slots(loads, ranks=8, slots=40, nodes=2)      # 256 experts, 64 copies
    change = rebalance(plan, new_loads, nodes=2)              # few moves: change.moves, change.before, change.after

EPLB (DeepSeek) in three greedy packings: experts onto nodes, copies to the experts with most load per copy, copies onto
the ranks of their node. A copy takes an equal share of its expert's tokens. A plan in use is mended first, one slot or
one swap at a time, each time what lowers the busiest rank most; it is packed anew only where mending comes to rest
clearly above that.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from moesaic.errors import UserError

CLOSE = 0.02  # of the mean load: as good as packed anew


def place_experts(loads: Sequence[float], ranks: int) -> list[int]:
    """An order of the experts, of which each rank takes the next len / ranks: the heaviest first, each to the rank with
    the least load that still has room."""
    if len(loads) % ranks:
        raise UserError("placement", f"{ranks} ranks do not divide {len(loads)} experts", "Every rank holds as many.")
    held = _packed([(load, expert) for expert, load in enumerate(loads)], ranks, len(loads) // ranks)
    return [expert for experts in held for expert in sorted(experts)]


def imbalance(loads: Sequence[float], ranks: int, order: Sequence[int] | None = None) -> float:
    """Load of the busiest rank over the mean: how much longer experts take than they would in balance."""
    order, here = order or range(len(loads)), len(loads) // ranks
    return _over_mean([sum(loads[expert] for expert in order[rank * here :][:here]) for rank in range(ranks)])


@dataclass(frozen=True)
class SlotPlan:
    """The expert in every slot of every rank; all ranks have as many slots."""

    slots: tuple[tuple[int, ...], ...]

    @classmethod
    def even(cls, experts: int, ranks: int, slots: int | None = None) -> SlotPlan:
        """Where nothing was measured yet: side by side, and copies of all in turn in the slots that are left."""
        slots = slots or -(-experts // ranks)
        _check(experts, ranks, slots)
        edges = [experts * rank // ranks for rank in range(ranks + 1)]
        held = [list(range(edges[rank], edges[rank + 1])) for rank in range(ranks)]
        for rank, own in enumerate(held):
            turn = (edges[rank + 1] + step for step in range(experts))
            own.extend([expert % experts for expert in turn if expert % experts not in own][: slots - len(own)])
            own.extend(own[: slots - len(own)])
        return cls(tuple(tuple(own) for own in held))

    @property
    def ranks(self) -> int:
        return len(self.slots)

    @property
    def experts(self) -> int:
        return 1 + max(expert for own in self.slots for expert in own)

    def copies(self) -> Counter[int]:
        """Ranks that hold each expert."""
        return Counter(expert for own in self.slots for expert in set(own))

    def holders(self, expert: int) -> list[int]:
        return [rank for rank, own in enumerate(self.slots) if expert in own]

    def loads(self, loads: Sequence[float]) -> list[float]:
        """Of every rank, each copy taking as many tokens as the others."""
        copies = self.copies()
        return [sum(loads[expert] / copies[expert] for expert in set(own)) for own in self.slots]

    def imbalance(self, loads: Sequence[float]) -> float:
        return _over_mean(self.loads(loads))


@dataclass(frozen=True)
class Move:
    """A slot that gets another expert, from a rank that has it; None: nobody has."""

    rank: int
    slot: int
    expert: int
    source: int | None


@dataclass(frozen=True)
class Rebalance:
    """From one plan to the next, and by how much the busiest rank exceeds the mean in each, on the same loads."""

    plan: SlotPlan
    moves: tuple[Move, ...]
    before: float
    after: float


def plan_slots(loads: Sequence[float], ranks: int, slots: int, nodes: int = 1, groups: int = 0) -> SlotPlan:
    """`slots` on each rank. Experts, or `groups` of neighbours that a router chooses together, lie on one of the
    `nodes` with all their copies, if they divide evenly; else anywhere."""
    _check(len(loads), ranks, slots)
    nodes, groups = _divided(len(loads), ranks, nodes, groups)
    size, per_node = len(loads) // groups, ranks // nodes
    members = [range(group * size, (group + 1) * size) for group in range(groups)]
    weights = [(sum(loads[expert] for expert in own), group) for group, own in enumerate(members)]
    held: list[list[int]] = []
    for of_node in _packed(weights, nodes, groups // nodes):
        own = [expert for group in sorted(of_node) for expert in members[group]]
        copies = _copies(own, loads, per_node, per_node * slots)
        entries = [(loads[expert] / count, expert) for expert, count in copies.items() for _ in range(count)]
        held.extend(_packed(entries, per_node, slots))
    return SlotPlan(tuple(tuple(sorted(own)) for own in held))


def rebalance(
    present: SlotPlan, loads: Sequence[float], nodes: int = 1, groups: int = 0, most_moves: int | None = None
) -> Rebalance:
    """A plan for these loads that is never worse than the present one, and keeps what it can of it."""
    nodes, groups = _divided(len(loads), present.ranks, nodes, groups)
    slots = len(present.slots[0])
    before = present.imbalance(loads)
    fresh = plan_slots(loads, present.ranks, slots, nodes, groups)
    best = fresh.imbalance(loads)
    mended = _mended(present, loads, best + CLOSE, present.ranks // nodes, most_moves)
    if mended.imbalance(loads) > best + CLOSE:
        matched = _matched(present, fresh, nodes)
        if most_moves is None or len(moves(present, matched)) <= most_moves:
            mended = matched
    if mended.imbalance(loads) >= before:
        mended = present
    changes = tuple(moves(present, mended))
    plan = after(present, changes)
    return Rebalance(plan, changes, before, plan.imbalance(loads))


def moves(present: SlotPlan, wanted: SlotPlan) -> list[Move]:
    """What changes: slots of a rank whose expert is wanted there no more get the ones it lacks. Whatever stays keeps
    its slot: `after` has the plan in that order."""
    found = []
    for rank, (now, then) in enumerate(zip(present.slots, wanted.slots, strict=True)):
        missing, free = Counter(then) - Counter(now), Counter(now) - Counter(then)
        slots = []
        for slot in range(len(now) - 1, -1, -1):  # of two copies in one rank the later goes
            if free[now[slot]]:
                free[now[slot]] -= 1
                slots.append(slot)
        for slot, expert in zip(sorted(slots), sorted(missing.elements()), strict=True):
            holders = [rank] if expert in now else present.holders(expert)
            # The nearest holder, and not always the same one.
            source = min(holders, key=lambda holder: ((rank - holder) % present.ranks, holder), default=None)
            found.append(Move(rank, slot, expert, source))
    return found


def after(present: SlotPlan, changes: Sequence[Move]) -> SlotPlan:
    """The plan once these moves are made."""
    held = [list(own) for own in present.slots]
    for move in changes:
        held[move.rank][move.slot] = move.expert
    return SlotPlan(tuple(tuple(own) for own in held))


def without_rank(present: SlotPlan, lost: int) -> SlotPlan:
    """The plan of the ranks that are left, all experts on them again: those that only the lost one held are dealt to
    the ranks with the fewest experts. Ranks keep their numbers; the lost one has no slots, others may have more."""
    held = [list(own) if rank != lost else [] for rank, own in enumerate(present.slots)]
    alive = [rank for rank, own in enumerate(held) if own]
    if not alive:
        raise UserError("experts", "no rank that holds any is left", "Start the group again.")
    there = {expert for own in held for expert in own}
    for expert in sorted(set(present.slots[lost]) - there):
        held[min(alive, key=lambda rank: (len(held[rank]), rank))].append(expert)
    return SlotPlan(tuple(tuple(own) for own in held))


def _divided(experts: int, ranks: int, nodes: int, groups: int) -> tuple[int, int]:
    """Nodes and groups as they are used: one node where ranks or experts do not divide evenly among them."""
    groups = groups or experts
    return (1, experts) if ranks % nodes or groups % nodes or experts % groups else (nodes, groups)


def _check(experts: int, ranks: int, slots: int) -> None:
    if ranks * slots < experts:
        raise UserError("placement", f"{ranks} ranks of {slots} slots do not hold {experts} experts", "Give more.")


def _over_mean(per_rank: Sequence[float]) -> float:
    total = sum(per_rank)
    return max(per_rank) * len(per_rank) / total if total else 1.0


def _copies(experts: Sequence[int], loads: Sequence[float], ranks: int, slots: int) -> dict[int, int]:
    """How many slots each expert gets: the next one goes to whoever has most load per copy. More than one on a rank
    would serve nobody."""
    copies = dict.fromkeys(experts, 1)
    heap = [(-loads[expert], expert) for expert in experts]
    heapq.heapify(heap)
    for _ in range(slots - len(copies)):
        while heap and copies[heap[0][1]] >= ranks:
            heapq.heappop(heap)
        if not heap:  # every expert is on every rank already; what is left holds anything
            copies[experts[0]] += 1
            continue
        expert = heap[0][1]
        copies[expert] += 1
        heapq.heapreplace(heap, (-loads[expert] / copies[expert], expert))
    return copies


def _packed(entries: Sequence[tuple[float, int]], bins: int, room: int) -> list[list[int]]:
    """`entries` are a load and what it is of: the heaviest first, each to the bin with the least load that has room and
    does not hold the same yet. Where only bins that hold it have room, another bin gives one up for it."""
    held, placed = [list[int]() for _ in range(bins)], [0.0] * bins
    share = {which: load for load, which in entries}
    for load, which in sorted(entries, key=lambda entry: (-entry[0], entry[1])):
        free = [at for at in range(bins) if len(held[at]) < room]
        new = [at for at in free if which not in held[at]]
        target = min(new or free, key=lambda at: (placed[at], at))
        if not new and (swap := _swap(held, which, target)) is not None:
            other, given = swap
            held[other].remove(given)
            held[target].append(given)
            placed[other] -= share[given]
            placed[target] += share[given]
            target = other
        held[target].append(which)
        placed[target] += load
    return held


def _swap(held: list[list[int]], which: int, target: int) -> tuple[int, int] | None:
    """A bin without `which`, and something of it that the target does not hold."""
    for other, own in enumerate(held):
        if which not in own:
            for given in reversed(own):  # the lightest
                if given not in held[target]:
                    return other, given
    return None


Change = list[tuple[int, int, int]]  # ranks, slots, and their new experts


def _mended(present: SlotPlan, loads: Sequence[float], enough: float, per_node: int, most: int | None) -> SlotPlan:
    """Change by change, until the busiest rank is near `enough` times the mean or no single change lowers it."""
    held = [list(own) for own in present.slots]
    mean = sum(loads) / len(held) if sum(loads) else 1.0
    made, limit = 0, most if most is not None else len(held) * len(held[0])
    while made < limit:
        state = _State(held, loads)
        worst = max(range(len(held)), key=lambda rank: (state.busy[rank], -rank))
        if state.busy[worst] <= enough * mean:
            break
        chosen: tuple[float, int, Change] | None = None
        for change in state.changes(worst, per_node):
            if made + len(change) <= limit:
                found = (state.busiest_after(change), len(change), change)
                # Fewer moves break a tie.
                if found[0] < state.busy[worst] * (1 - 1e-9) and (chosen is None or found[:2] < chosen[:2]):
                    chosen = found
        if chosen is None:
            break
        for rank, slot, expert in chosen[2]:
            held[rank][slot] = expert
        made += chosen[1]
    return SlotPlan(tuple(tuple(own) for own in held))


class _State:
    """Slots as they are, and what a change would do to the ranks that it touches."""

    def __init__(self, held: list[list[int]], loads: Sequence[float]) -> None:
        self.held, self.loads = held, loads
        self.holders: dict[int, set[int]] = {}
        for rank, own in enumerate(held):
            for expert in own:
                self.holders.setdefault(expert, set()).add(rank)
        self.busy = [sum(self._share(expert) for expert in set(own)) for own in held]

    def _share(self, expert: int, more: int = 0) -> float:
        """The load of one of its copies, if there were more of them."""
        return self.loads[expert] / (len(self.holders[expert]) + more)

    def changes(self, worst: int, per_node: int) -> Iterator[Change]:
        """Ways to relieve a rank: swap one of its experts for a lighter one of another rank of its node, or put a copy
        of one of its experts there where something has copies elsewhere."""
        held, first = self.held, worst - worst % per_node
        for other in range(first, first + per_node):
            if other == worst:
                continue
            for there, given in enumerate(held[other]):
                spare = len(self.holders[given]) > 1 or held[other].count(given) > 1
                for here, expert in enumerate(held[worst]):
                    if other in self.holders[expert] or not self.loads[expert]:
                        continue
                    if spare:
                        yield [(other, there, expert)]
                    if worst not in self.holders[given] and self._share(given) < self._share(expert):
                        yield [(other, there, expert), (worst, here, given)]

    def busiest_after(self, change: Change) -> float:
        """The load of the busiest rank that it touches."""
        other, there, expert = change[0]
        given = self.held[other][there]
        if len(change) == 2:
            moved, worst = self._share(expert) - self._share(given), change[1][0]
            return max(self.busy[other] + moved, self.busy[worst] - moved)
        new = {other: self.busy[other] + self._share(expert, 1)}
        for rank in self.holders[expert]:
            new[rank] = self.busy[rank] - self._share(expert) + self._share(expert, 1)
        if self.held[other].count(given) == 1:  # others take what it took
            new[other] -= self._share(given)
            for rank in self.holders[given] - {other}:
                new[rank] = new.get(rank, self.busy[rank]) - self._share(given) + self._share(given, -1)
        return max(new.values())


def _matched(present: SlotPlan, fresh: SlotPlan, nodes: int) -> SlotPlan:
    """The same packing with its nodes, and in each its ranks, numbered so that much stays where it is."""
    per_node = present.ranks // nodes
    nodes_now, nodes_new = _by_node(present, per_node), _by_node(fresh, per_node)
    order = _assigned([sum(own, ()) for own in nodes_now], [sum(own, ()) for own in nodes_new])
    found: list[tuple[int, ...]] = []
    for node, own in enumerate(nodes_now):
        new = nodes_new[order[node]]
        found.extend(new[at] for at in _assigned(own, new))
    return after(present, moves(present, SlotPlan(tuple(found))))


def _by_node(plan: SlotPlan, per_node: int) -> list[tuple[tuple[int, ...], ...]]:
    return [plan.slots[first : first + per_node] for first in range(0, plan.ranks, per_node)]


def _assigned(now: Sequence[Sequence[int]], new: Sequence[Sequence[int]]) -> list[int]:
    """For each set of now one of the new sets, those with most in common first."""
    common = [
        (-sum((Counter(one) & Counter(other)).values()), at, to)
        for at, one in enumerate(now)
        for to, other in enumerate(new)
    ]
    chosen: dict[int, int] = {}
    for _, at, to in sorted(common):
        if at not in chosen and to not in chosen.values():
            chosen[at] = to
    return [chosen[at] for at in range(len(now))]
