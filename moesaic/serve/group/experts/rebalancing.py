"""Rank 0 decides from measured loads what slots should hold, every so many steps, and tells the other ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from moesaic.errors import UserError
from moesaic.parallel.experts.placement import Move, SlotPlan, rebalance
from moesaic.serve.core.stats import ExpertCounts
from moesaic.serve.group.step_array import Reader

logger = logging.getLogger("moesaic.serve")

WORTH = 0.02  # of the mean load: what a layer must gain to be changed
Changes = dict[int, Sequence[Move]]  # by layer


@dataclass(frozen=True)
class ExpertOptions:
    """`copies` slots of each rank beyond its share of the experts, and how many steps are between two looks at the
    load; 0: slots stay as they are."""

    copies: int = 0
    steps: int = 0

    @classmethod
    def taken_from(cls, options: dict[str, Any]) -> tuple[ExpertOptions, dict[str, Any]]:
        """Options of an engine, and those that are about experts."""
        rest = {key: value for key, value in options.items() if key not in ("expert_replicas", "rebalance_steps")}
        found = cls(options.get("expert_replicas") or 0, options.get("rebalance_steps") or 0)
        for flag, number in (("--expert-replicas", found.copies), ("--rebalance-steps", found.steps)):
            if number < 0:
                raise UserError(flag, f"must be at least 0, not {number}")
        return found, rest

    def __bool__(self) -> bool:
        return bool(self.copies or self.steps)


def for_engine(copies: int, steps: int, layout: str) -> dict[str, int]:
    """What --expert-replicas and --rebalance-steps add to the options of an engine."""
    if (copies or steps) and not layout:
        flag = "--expert-replicas" if copies else "--rebalance-steps"
        raise UserError(flag, "needs experts on several ranks", 'Say --layout "ep=2", or --attention and --experts.')
    given = {"expert_replicas": copies, "rebalance_steps": steps}
    return {name: number for name, number in given.items() if number}


class Round(NamedTuple):
    """One look: how far the busiest rank was above the mean since the last one, and would have been with the new plan.
    Over all layers, each as long as its busiest rank."""

    step: int
    before: float
    after: float
    moves: int


class Rebalancer:
    """`plans` are read at every look; `apply` makes the changes on all ranks. After a look the layers are changed one
    by one, spread over the steps until the next: planning hundreds of ranks takes a while, and requests wait."""

    def __init__(
        self,
        counts: ExpertCounts,
        plans: Callable[[], dict[int, SlotPlan]],
        apply: Callable[[Changes], None],
        steps: int,
        nodes: int = 1,
    ) -> None:
        self.counts, self.plans, self.apply, self.steps, self.nodes = counts, plans, apply, steps, nodes
        self.rounds: list[Round] = []
        self._step = 0
        self._seen: dict[int, list[int]] = {}
        self._waiting: list[tuple[int, list[float]]] = []  # layers and their loads
        self._share = 1  # of them, in a step
        self._sums = _Sums()

    def before_step(self) -> None:
        if self.steps and self._step and self._step % self.steps == 0:
            self.look()
        for _ in range(min(self._share, len(self._waiting))):
            self._rebalance(*self._waiting.pop(0))
            if not self._waiting:
                self.rounds.append(self._sums.round(self._step))
        self._step += 1

    def look(self) -> None:
        total = self.counts.by_layer()
        nothing = {layer: [0] * len(loads) for layer, loads in total.items()}
        seen, self._seen = self._seen or nothing, total
        loads = {
            layer: [float(now - then) for now, then in zip(total[layer], seen[layer], strict=True)]
            for layer in self.plans()
        }
        self._waiting = [(layer, found) for layer, found in loads.items() if sum(found)]
        self._share, self._sums = -(-len(self._waiting) // self.steps) if self.steps else len(self._waiting), _Sums()

    def _rebalance(self, layer: int, loads: list[float]) -> None:
        plan = self.plans().get(layer)
        if plan is None:  # a rank was lost since
            return
        change = rebalance(plan, loads, self.nodes)
        worth = bool(change.moves) and change.before - change.after >= WORTH
        self._sums.add(change.before, change.after if worth else change.before, sum(loads) / plan.ranks)
        if worth:
            self._sums.moves += len(change.moves)
            self.apply({layer: change.moves})


class _Sums:
    """Of a look's layers: a layer takes as long as its busiest rank."""

    def __init__(self) -> None:
        self.before = self.after = self.mean = 0.0
        self.moves = 0

    def add(self, before: float, after: float, mean: float) -> None:
        self.before, self.after, self.mean = self.before + before * mean, self.after + after * mean, self.mean + mean

    def round(self, step: int) -> Round:
        before, after = (total / self.mean if self.mean else 1.0 for total in (self.before, self.after))
        if self.moves:
            text = "experts: the busiest rank has %.2f times the mean, after %d moves %.2f"
            logger.info(text, before, self.moves, after)
        return Round(step, before, after, self.moves)


def write_changes(changes: Changes) -> list[int]:
    numbers = [len(changes)]
    for layer, moves in changes.items():
        numbers += [layer, len(moves)]
        for move in moves:
            numbers += [move.rank, move.slot, move.expert, -1 if move.source is None else move.source]
    return numbers


def read_changes(numbers: Reader) -> Changes:
    found: Changes = {}
    for _ in range(numbers.one()):
        layer, count = numbers.take(2)
        moves = [numbers.take(4) for _ in range(count)]
        found[layer] = [
            Move(rank, slot, expert, None if source < 0 else source) for rank, slot, expert, source in moves
        ]
    return found
