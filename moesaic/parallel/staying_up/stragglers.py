"""Who makes a step slow: the time that each rank itself needs for each operation, beside that of its peers.

Ranks wait for each other in collectives, so the time an operation takes is the same on all, whoever is slow. What a
rank needs itself is that time without its collectives, and a rank costs what it needs beyond the median of its peers:
the ranks of the same pipeline stage.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

WHOLE = ("pipeline",)  # stands around other operations
LEAST = 0.02  # of a step: less is nobody's fault


@dataclass(frozen=True)
class Straggler:
    rank: int
    operation: str
    seconds: float  # of a step, more than its peers
    share: float  # of a step

    def __str__(self) -> str:
        return f"rank {self.rank} is slow in {self.operation}: {self.seconds * 1e3:.1f} ms of a step ({self.share:.0%})"


def own_seconds(events: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Of a rank's events (traces.py, flows.py), the time of each operation without the collectives in it."""
    operations = [event for event in events if event["cat"] != "flow" and event["cat"] not in WHOLE]
    operations.sort(key=lambda event: event["ts"])
    starts = [event["ts"] for event in operations]
    found: dict[str, float] = {}
    for event in operations:
        found[event["cat"]] = found.get(event["cat"], 0.0) + event["dur"] / 1e6
    for event in events:
        place = bisect_right(starts, event["ts"]) - 1
        if event["cat"] == "flow" and place >= 0 and event["ts"] < starts[place] + operations[place]["dur"]:
            found[operations[place]["cat"]] -= event["dur"] / 1e6
    return found


def stragglers(
    seconds: Sequence[Mapping[str, float]], peers: Sequence[int], steps: int, step_seconds: float
) -> list[Straggler]:
    """The costliest first. `seconds`: of each rank by operation, over `steps` steps of `step_seconds` each; `peers`:
    the number of each rank's kind (its pipeline stage): ranks are compared with their own."""
    found = []
    for rank, own in enumerate(seconds):
        mine = [other for other, kind in zip(seconds, peers, strict=True) if kind == peers[rank]]
        if len(mine) < 2:
            continue
        for operation, needed in own.items():
            others = [other.get(operation, 0.0) for other in mine]
            usual = median(others) if len(mine) > 2 else min(others)  # of two, the faster is the norm
            more = (needed - usual) / max(steps, 1)
            if more > LEAST * step_seconds:
                found.append(Straggler(rank, operation, more, more / step_seconds))
    return sorted(found, key=lambda one: -one.seconds)
