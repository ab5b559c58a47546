"""Which critiques hold: filtered by self-consistency, agreement of several judges, and code that knows (IF-CRITIC).

    settle([[("Right.\\nRating: [[9]]", 1), ("No.\\nRating: [[2]]", -1)]], truth=1, agree=0.0).kept

A verdict has a side: 1 good, kept, or the first of two is better; -1 bad, broken, or the second is; 0 in between.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

Said = Sequence[tuple[str, int]]  # critiques of one judge, with the side of their verdicts


@dataclass(frozen=True)
class Settled:
    """What holds of something that was judged, the critiques that say so, and those that say otherwise."""

    side: int
    kept: tuple[str, ...]
    rejected: tuple[str, ...]


def side_of(worth: float) -> int:
    """Of a score from 0 to 1."""
    return (worth > 0.5) - (worth < 0.5)


def settle(said: Sequence[Said], truth: int | None, agree: float) -> Settled | str:
    """Or why nothing is settled. `said` is by judge; `truth` is what code says, where code can. Of each judge's
    critiques the share `agree` must be on one side, the same for all judges and that of the truth; at 0 the truth alone
    decides, so that also a judge that is mostly wrong has critiques to learn from."""
    if not all(said):
        return "unreadable"
    counts = [Counter(side for _, side in own).most_common(1)[0] for own in said]
    if agree and any(count < agree * len(own) for (_, count), own in zip(counts, said, strict=True)):
        return "inconsistent"
    if (agree or truth is None) and len({side for side, _ in counts}) > 1:
        return "contradicted"
    side = counts[0][0]
    if truth is not None:
        if agree and side != truth:
            return "refuted"
        side = truth
    every = [one for own in said for one in own]
    kept = tuple(dict.fromkeys(text for text, own in every if own == side))
    rejected = tuple(dict.fromkeys(text for text, own in every if own == -side and side))
    return Settled(side, kept, rejected) if kept else "refuted"
