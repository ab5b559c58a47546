"""Discrete-event simulation of operations on streams: when each starts and ends, and what the makespan hangs on.

Operations of one (rank, stream) run in list order, as kernels of a CUDA stream do; each starts when its stream is free
and what it waits for has ended. No event queue is needed: with the order of every stream given, start times follow from
one pass over the dependency graph. `Graph` is that graph compiled once, to be replayed with other durations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from moesaic.errors import UserError


class Operation(NamedTuple):
    """One thing that occupies a stream of a rank. `after` holds the places in the list of what has to end first."""

    name: str
    kind: str
    rank: int
    stream: str
    seconds: float
    after: tuple[int, ...] = ()
    micro_batch: int | None = None
    stage: int | None = None
    chunk: int | None = None
    step: int | None = None


class Graph:
    """Who waits for whom. The order in `order` is one in which every operation comes after what it waits for."""

    def __init__(self, operations: Sequence[Operation]) -> None:
        self.operations = list(operations)
        self.predecessors, in_order = _predecessors(self.operations)
        count = len(self.operations)
        self.order: Sequence[int] = range(count) if in_order else _topological(self.operations, self.predecessors)

    def run(self, seconds: Sequence[float] | None = None) -> Timeline:
        """Starts and ends with each operation's own seconds, or with others."""
        durations = [operation.seconds for operation in self.operations] if seconds is None else list(seconds)
        predecessors = self.predecessors
        starts, ends = [0.0] * len(durations), [0.0] * len(durations)
        for number in self.order:
            start = 0.0
            for before in predecessors[number]:
                if ends[before] > start:
                    start = ends[before]
            starts[number] = start
            ends[number] = start + durations[number]
        return Timeline(self, np.array(starts), np.array(ends))

    def replay(self, seconds_NS: np.ndarray) -> np.ndarray:
        """Ends for many assignments of durations at once: a column of seconds gives a column of ends."""
        count, width = seconds_NS.shape
        ends = np.zeros(
            (count + 1, width)
        )  # the last row is what an operation waits for that waits for nothing: time 0
        for numbers, before, offsets in self._levels:
            ends[numbers] = np.maximum.reduceat(ends[before], offsets, axis=0) + seconds_NS[numbers]
        return ends[:count]

    @cached_property
    def _levels(self) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Operations by the longest chain before them: of each level numbers, what they wait for, where that begins."""
        depth = [0] * len(self.operations)
        levels: list[list[int]] = []
        for number in self.order:
            deepest = max((depth[before] + 1 for before in self.predecessors[number]), default=0)
            depth[number] = deepest
            if deepest == len(levels):
                levels.append([])
            levels[deepest].append(number)
        nothing = (len(self.operations),)
        compiled = []
        for numbers in levels:
            waits = [self.predecessors[number] or nothing for number in numbers]
            offsets = np.cumsum([0] + [len(wait) for wait in waits[:-1]])
            compiled.append((np.array(numbers), np.array([before for wait in waits for before in wait]), offsets))
        return compiled


@dataclass(frozen=True)
class Timeline:
    """When each operation of a graph started and ended."""

    graph: Graph
    starts: np.ndarray
    ends: np.ndarray

    @property
    def operations(self) -> list[Operation]:
        return self.graph.operations

    @property
    def makespan(self) -> float:
        return float(self.ends.max(initial=0.0))

    def busy(self) -> dict[tuple[int, str], float]:
        """Seconds in which each (rank, stream) had something to do."""
        seconds: dict[tuple[int, str], float] = {}
        spans = (self.ends - self.starts).tolist()
        for operation, span in zip(self.operations, spans):
            place = (operation.rank, operation.stream)
            seconds[place] = seconds.get(place, 0.0) + span
        return seconds

    def idle(self) -> dict[tuple[int, str], float]:
        """Seconds of the makespan in which each (rank, stream) had nothing to do."""
        makespan = self.makespan
        return {place: makespan - seconds for place, seconds in self.busy().items()}

    def critical_path(self) -> list[int]:
        """Places in the list of the operations that the end waited for, one after the other, first to last."""
        if not self.operations:
            return []
        path = [int(self.ends.argmax())]
        while before := self.graph.predecessors[path[-1]]:
            path.append(max(before, key=lambda number: self.ends[number]))
        return path[::-1]


def simulate(operations: Sequence[Operation]) -> Timeline:
    """Runs the operations; a UserError if some wait for each other."""
    return Graph(operations).run()


def _predecessors(operations: list[Operation]) -> tuple[list[tuple[int, ...]], bool]:
    """For each operation what it waits for, its stream's previous one too; and whether all of that stands before it."""
    count = len(operations)
    latest: dict[tuple[int, str], int] = {}
    predecessors = []
    in_order = True
    for number, operation in enumerate(operations):
        if not 0.0 <= operation.seconds < float("inf"):
            problem = f"takes {operation.seconds} seconds"
            raise UserError(f"operation {operation.name!r}", problem, "Durations are finite and not negative.")
        waits = operation.after
        for before in waits:
            if before >= number:
                in_order = False
            if not 0 <= before < count:
                problem = f"waits for operation {before} of {count}"
                raise UserError(
                    f"operation {operation.name!r}", problem, "Operations are numbered from 0 in list order."
                )
        place = (operation.rank, operation.stream)
        previous = latest.get(place)
        predecessors.append(waits if previous is None else (*waits, previous))
        latest[place] = number
    return predecessors, in_order


def _topological(operations: list[Operation], predecessors: list[tuple[int, ...]]) -> list[int]:
    """An order in which everything comes after what it waits for (Kahn's algorithm)."""
    followers: list[list[int]] = [[] for _ in predecessors]
    missing = [len(waits) for waits in predecessors]
    for number, waits in enumerate(predecessors):
        for before in waits:
            followers[before].append(number)
    order = [number for number, count in enumerate(missing) if not count]
    for number in order:  # grows while it is read
        for follower in followers[number]:
            missing[follower] -= 1
            if not missing[follower]:
                order.append(follower)
    if len(order) < len(predecessors):
        stuck = {number for number, count in enumerate(missing) if count}
        circle = _circle(min(stuck), stuck, predecessors)
        names = " -> ".join(operations[number].name for number in circle[:8]) + (" -> ..." if len(circle) > 8 else "")
        problem = f"{len(stuck)} operations wait for each other: {names}"
        raise UserError(
            "the dependency graph", problem, "Change the order on a stream or a dependency so that one can start."
        )
    return order


def _circle(start: int, stuck: set[int], predecessors: list[tuple[int, ...]]) -> list[int]:
    """Operations of which each waits for the one before it, the first for the last; the first stands at both ends."""
    walk, place = [start], {start: 0}
    while True:
        before = next(number for number in predecessors[walk[-1]] if number in stuck)
        if before in place:
            return [before, *walk[place[before] :][::-1]]
        place[before] = len(walk)
        walk.append(before)
