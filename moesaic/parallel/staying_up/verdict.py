"""Who holds the others up: from what every rank has said of itself.

A rank says what it does, how long it has made no progress, and how many collectives of each of its groups it has begun.
In a group, whoever has begun fewer than another has not arrived, and the other waits for it. So the ranks to name are
those that have not arrived somewhere and wait for nobody themselves; and before them those that say nothing any more:
a stopped process, or one whose machine is gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Word:
    """What a rank said last, as seen from another."""

    rank: int
    step: int
    operation: str
    stalled: float  # seconds without progress
    silent: float = 0.0  # seconds since it said something new
    patient: bool = False
    begun: dict[str, int] = field(default_factory=dict)  # group -> collectives begun
    line: str = ""  # of the program
    host: str = ""
    pid: int = 0


@dataclass(frozen=True)
class Stuck:
    rank: int
    step: int
    operation: str
    seconds: float
    silent: bool
    text: str


def stuck(words: Sequence[Word], bound: float, silence: float) -> Stuck | None:
    """The rank that holds the others up for longer than `bound` seconds, if one does. `silence`: how long a living rank
    may say nothing."""
    late = [word for word in words if max(word.silent, 0.0 if word.patient else word.stalled) >= bound]
    if not late:
        return None
    quiet = [word for word in words if word.silent >= silence]
    behind, waiting = not_arrived(words)
    missing = [word for word in words if word.rank in behind and word.rank not in waiting]
    first = max((quiet or missing or late), key=lambda word: (max(word.silent, word.stalled), -word.rank))
    if first.patient and not quiet:
        return None  # it takes its time, and says so
    seconds = max(first.silent, first.stalled)
    return Stuck(first.rank, first.step, first.operation, seconds, bool(quiet), _text(first, quiet, behind, words))


def not_arrived(words: Sequence[Word]) -> tuple[dict[int, str], dict[int, str]]:
    """Ranks that others wait for in a group, and those that wait, each with the group."""
    behind: dict[int, str] = {}
    waiting: dict[int, str] = {}
    for group in sorted({group for word in words for group in word.begun}):
        members = [word for word in words if group in word.begun]
        most = max(word.begun[group] for word in members)
        if any(word.begun[group] < most for word in members):
            for word in members:
                (behind if word.begun[group] < most else waiting).setdefault(word.rank, group)
    return behind, waiting


def _text(first: Word, quiet: Sequence[Word], behind: dict[int, str], words: Sequence[Word]) -> str:
    where = f"step {first.step}, {first.operation}" + (f" ({first.line})" if first.line else "")
    who = f"rank {first.rank}" + (f" (process {first.pid} on {first.host})" if first.host else "")
    if quiet:
        others = [word.rank for word in quiet if word.rank != first.rank]
        text = f"{who} has said nothing for {first.silent:.1f} s; it was in {where}"
        return text + (f"; nor have ranks {', '.join(map(str, others))}" if others else "")
    group = behind.get(first.rank)
    if group is None:
        return f"{who} has made no progress for {first.stalled:.1f} s in {where}, and no other rank is behind it"
    ahead = [word.rank for word in words if word.begun.get(group, -1) > first.begun[group]]
    waits = f"rank {ahead[0]} waits" if len(ahead) == 1 else f"ranks {', '.join(map(str, ahead))} wait"
    number = first.begun[group] + 1
    return f"{who} has not arrived: {where}, for {first.stalled:.1f} s; {waits} in collective {number} of group {group}"
