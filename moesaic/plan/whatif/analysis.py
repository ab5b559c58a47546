"""What-if analysis of a recorded run: how fast had it been without its stragglers, and what made it slow.

After "Understanding Stragglers in Large Model Training Using What-if Analysis" (Lin et al., 2025): the dependency graph
of the trace (`trace_graph.py`) is replayed with every operation's time replaced by the mean of its kind (transfers: the
median); the slow-down is actual by ideal. Replays in which only one worker, stage, kind or step is healed, or all but
it, say what each has to do with it. `causes.py` looks for what is behind it; causes are ranked by the time
that healing each alone would save.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from moesaic.errors import UserError
from moesaic.plan.timeline.trace import COMPUTE_KINDS, Trace
from moesaic.plan.whatif.causes import candidates
from moesaic.plan.whatif.trace_graph import TraceGraph, trace_graph

MOST_PLACES = 128  # of a part that are replayed one by one: of more, those with most time above the ideal


@dataclass(frozen=True)
class Contribution:
    """What a part of the run has to do with its slowness."""

    part: str  # worker, stage, data-parallel rank, kind or step
    place: str
    saved_seconds: float  # by healing only this part
    saved_share: float  # of the actual time
    slowdown_alone: float  # with everything but this part healed


@dataclass(frozen=True)
class Cause:
    cause: str
    place: Mapping[str, int | list[int]]
    saved_seconds: float
    saved_share: float
    healed_seconds: float  # of the whole trace, with only this cause taken away
    evidence: str


@dataclass(frozen=True)
class WhatIf:
    steps: int
    ranks: int
    actual_seconds: float
    ideal_seconds: float
    slowdown: float
    wasted_gpu_hours: float
    replay_error: float  # the replay with recorded times against the recorded time
    contributions: list[Contribution]
    causes: list[Cause]

    def summary(self) -> str:
        first = self.causes[0] if self.causes else None
        cause = (
            f" First cause: {first.cause} ({_place(first.place)}), {first.saved_share:.1%} of the time."
            if first
            else ""
        )
        unsure = f" The replay is {self.replay_error:.1%} off: mind the rest." if self.replay_error > 0.05 else ""
        where = f"{_count(self.steps, 'step')} on {_count(self.ranks, 'rank')}"
        return (
            f"{where} took {self.actual_seconds:.4g} s, without stragglers {self.ideal_seconds:.4g} s: "
            f"slow-down {self.slowdown:.3f}, {self.wasted_gpu_hours:.3g} GPU hours wasted.{cause}{unsure}"
        )

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def table(self, most: int = 5) -> list[dict[str, str]]:
        """Rows to print: the ranked causes, then of each part of the run the places that matter most."""
        shown = 0.0005  # less is nothing
        rows = [
            {
                "what": cause.cause,
                "where": _place(cause.place),
                "saves": f"{cause.saved_share:.1%}",
                "why": cause.evidence,
            }
            for cause in self.causes[:most]
            if cause.saved_share >= shown
        ]
        parts = dict.fromkeys(contribution.part for contribution in self.contributions)
        for part in parts:
            mine = [one for one in self.contributions if one.part == part and one.saved_share >= shown]
            for contribution in mine[:most]:
                why = f"{contribution.slowdown_alone:.3f}x if all else were ideal"
                saves = f"{contribution.saved_share:.1%}"
                rows.append({"what": part, "where": contribution.place, "saves": saves, "why": why})
        return rows


def analyse(trace: Trace, ideal: str = "mean") -> WhatIf:
    """The whole analysis. `ideal` is what computations are idealised by: the `mean` of their kind, or the `median`."""
    if ideal not in ("mean", "median"):
        raise UserError(f"ideal {ideal!r}", "is unknown", "Known are: mean, median.")
    if not trace.records:
        raise UserError("the trace", "holds no operations", "Record at least one step.")
    run = trace_graph(trace)
    work, delay = _ideal(run, ideal)
    parts = list(_parts(run, work))
    found = candidates(run)

    def scenarios() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        yield run.work, run.delay
        yield work, delay
        for _, _, mine in parts:
            yield np.where(mine, work, run.work), np.where(mine, delay, run.delay)
            yield np.where(mine, run.work, work), np.where(mine, run.delay, delay)
        for candidate in found:
            yield candidate.work, candidate.delay

    seconds = run.replay(scenarios()).tolist()
    actual, best = seconds[:2]
    contributions = [
        Contribution(part, place, actual - only, _share(actual - only, actual), _ratio(alone, best))
        for (part, place, _), only, alone in zip(parts, seconds[2::2], seconds[3::2])
    ]
    contributions.sort(key=lambda one: -one.saved_seconds)
    order = list(dict.fromkeys(part for part, _, _ in parts))
    contributions.sort(key=lambda one: order.index(one.part))
    causes = [
        Cause(one.cause, one.place, actual - healed, _share(actual - healed, actual), healed, one.evidence)
        for one, healed in zip(found, seconds[2 + 2 * len(parts) :])
    ]
    return WhatIf(
        steps=len(trace.steps),
        ranks=len(trace.ranks),
        actual_seconds=actual,
        ideal_seconds=best,
        slowdown=_ratio(actual, best),
        wasted_gpu_hours=(actual - best) * len(trace.ranks) / 3600,
        replay_error=_share(abs(actual - run.recorded_seconds), run.recorded_seconds),
        contributions=contributions,
        causes=sorted((cause for cause in causes if cause.saved_seconds > 0), key=lambda cause: -cause.saved_seconds),
    )


def _ideal(run: TraceGraph, ideal: str) -> tuple[np.ndarray, np.ndarray]:
    kinds = run.column("kind")
    work, delay = run.work.copy(), run.delay.copy()
    for kind in np.unique(kinds):
        mine = kinds == kind
        mean = ideal == "mean" and kind in COMPUTE_KINDS
        work[mine] = np.mean(work[mine]) if mean else np.median(work[mine])
        waited = mine & ~run.begins
        if waited.any():
            delay[waited] = np.minimum(delay[waited], np.median(delay[waited]))
    return work, delay


def _parts(run: TraceGraph, ideal: np.ndarray) -> Iterator[tuple[str, str, np.ndarray]]:
    """Kinds of parts, the places of each, and which operations belong to it."""
    rank, stage, dp, tp, kind, step = (run.column(name) for name in ("rank", "stage", "dp", "tp", "kind", "step"))
    above = np.maximum(run.work - ideal, 0.0) + run.delay

    def places(column: np.ndarray) -> Iterator[tuple[Any, np.ndarray, int]]:
        """Each value, where it stands, and one such row."""
        values, rows, numbers = np.unique(column, return_index=True, return_inverse=True)
        chosen = np.argsort(-np.bincount(numbers, above), kind="stable")[:MOST_PLACES]
        for number in np.sort(chosen):
            yield values[number], numbers == number, int(rows[number])

    for one, mine, row in places(rank):
        yield "worker", f"rank {one} (stage {stage[row]}, dp {dp[row]}, tp {tp[row]})", mine
    if tp.max() > 0:
        for _, mine, row in places(stage * (dp.max() + 1) + dp):
            yield "position", f"stage {stage[row]}, dp {dp[row]}", mine
    for name, column in (("stage", stage), ("dp", dp)):
        if column.max() > 0:
            yield from ((name, f"{name} {one}", mine) for one, mine, _ in places(column))
    yield from (("kind", str(one), mine) for one, mine, _ in places(kind))
    yield from (("step", f"step {one}", mine) for one, mine, _ in places(step))


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _ratio(actual: float, ideal: float) -> float:
    return actual / ideal if ideal else 1.0


def _place(place: Mapping[str, int | list[int]]) -> str:
    words = []
    for name, value in place.items():
        if isinstance(value, list):
            shown = ", ".join(map(str, value[:8])) + (f" and {len(value) - 8} more" if len(value) > 8 else "")
            words.append(f"{name} {shown}")
        else:
            words.append(f"{name} {value}")
    return ", ".join(words) or "everywhere"
