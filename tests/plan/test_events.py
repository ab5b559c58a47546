"""The event simulation against a clock that ticks through the same operations, and its errors."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moesaic.errors import UserError
from moesaic.plan.timeline.events import Graph, Operation, simulate


@st.composite
def programs(draw: st.DrawFn) -> list[Operation]:
    """Operations with dependencies in both directions of the list, without a cycle."""
    count = draw(st.integers(1, 25))
    streams = draw(st.integers(1, 5))
    operations = []
    for number in range(count):
        after = draw(st.lists(st.integers(0, number - 1), max_size=3, unique=True)) if number else []
        operations.append(
            Operation(
                f"operation {number}",
                "any",
                draw(st.integers(0, streams - 1)),
                "compute",
                draw(st.integers(0, 9)),
                tuple(after),
            )
        )
    # Streams one after the other: the order on each is kept, and what is waited for may now stand later in the list.
    places = sorted(range(count), key=lambda number: operations[number].rank) if draw(st.booleans()) else range(count)
    new = {old: place for place, old in enumerate(places)}
    return [operations[old]._replace(after=tuple(new[wait] for wait in operations[old].after)) for old in places]


def by_the_clock(operations: list[Operation]) -> list[tuple[int, int]]:
    """Starts and ends of operations with whole seconds, tick by tick: at each, streams take up what they can."""
    queues: dict[tuple[int, str], list[int]] = {}
    for number, operation in enumerate(operations):
        queues.setdefault((operation.rank, operation.stream), []).append(number)
    spans: dict[int, tuple[int, int]] = {}
    for now in range(10 * len(operations) + 1):
        moved = True
        while moved:  # operations of no length may release others at the same tick
            moved = False
            for queue in queues.values():
                running = [number for number in queue if number in spans and spans[number][1] > now]
                waiting = [number for number in queue if number not in spans]
                if running or not waiting:
                    continue
                number = waiting[0]
                if all(wait in spans and spans[wait][1] <= now for wait in operations[number].after):
                    spans[number] = (now, now + int(operations[number].seconds))
                    moved = True
    return [spans[number] for number in range(len(operations))]


@settings(deadline=None, max_examples=150)
@given(programs())
def test_starts_and_ends_are_those_of_a_clock(operations: list[Operation]) -> None:
    timeline = simulate(operations)
    truth = by_the_clock(operations)
    assert timeline.starts.tolist() == [start for start, _ in truth]
    assert timeline.ends.tolist() == [end for _, end in truth]
    for place, busy in timeline.busy().items():
        mine = [operation.seconds for operation in operations if (operation.rank, operation.stream) == place]
        assert busy == sum(mine) and timeline.idle()[place] == timeline.makespan - sum(mine)
    path = timeline.critical_path()
    assert sum(operations[number].seconds for number in path) == timeline.makespan
    assert all(timeline.ends[one] == timeline.starts[next] for one, next in pairwise(path))


@settings(deadline=None, max_examples=50)
@given(programs(), st.integers(0, 2**32 - 1))
def test_replaying_many_durations_at_once_is_running_each(operations: list[Operation], seed: int) -> None:
    graph = Graph(operations)
    seconds_NS = np.random.default_rng(seed).random((len(operations), 4))
    together = graph.replay(seconds_NS)
    for column in range(4):
        np.testing.assert_array_equal(together[:, column], graph.run(seconds_NS[:, column].tolist()).ends)


def test_a_deadlock_names_who_waits_for_whom() -> None:
    operations = [
        Operation("receive a", "wait", 0, "compute", 1.0, (3,)),
        Operation("send b", "send", 0, "compute", 1.0),
        Operation("receive b", "wait", 1, "compute", 1.0, (1,)),
        Operation("send a", "send", 1, "compute", 1.0),
    ]
    with pytest.raises(UserError, match="4 operations wait for each other: receive a.*send"):
        simulate(operations)


@pytest.mark.parametrize(
    ("operation", "problem"),
    [
        (Operation("x", "any", 0, "compute", -1.0), "takes -1.0 seconds"),
        (Operation("x", "any", 0, "compute", float("nan")), "takes nan seconds"),
        (Operation("x", "any", 0, "compute", 1.0, (5,)), "waits for operation 5 of 1"),
    ],
)
def test_nonsense_is_refused(operation: Operation, problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        simulate([operation])


def test_nothing_takes_no_time() -> None:
    timeline = simulate([])
    assert timeline.makespan == 0.0 and timeline.critical_path() == []
