"""What made a recorded run slow: candidate causes, each with the operation times the run would have had without it.

The time of a computation is taken apart as base x stage x worker x micro-batch x rest, in logarithms, by medians, so
that a few outliers move nothing. Each factor is what one cause looks like: a stage that is slow on all its replicas
(the last one's loss layer), one worker slower than the same stage elsewhere, micro-batches that are slow on every stage
and in both directions (long sequences), and, in the rest, rare large outliers that no other rank shares
(garbage-collection pauses). Links are compared with each other in the same way. A cause is healed by taking its factor,
and nothing else, out of the times. Where peers split evenly the faster half counts as the norm: stragglers make runs
slower, not faster.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from moesaic.plan.timeline.trace import COMPUTE_KINDS, RECEIVE_KINDS, SEND_KINDS
from moesaic.plan.whatif.trace_graph import TraceGraph

SLOW_WORKER = "slow worker"
STAGE_IMBALANCE = "stage imbalance"
SEQUENCE_IMBALANCE = "sequence-length imbalance"
PAUSES = "garbage-collection pauses"
SLOW_LINK = "slow link"
ROUNDS = 4  # of fitting cells and micro-batches in turn
SIGNIFICANT = 3.0  # standard errors
OUTLIER = 5.0  # standard deviations of the rest
LEAST_OUTLIER = 0.1  # and at least this much longer
LEAST_EFFECT = 0.005
LEAST_LINK = 1.1


@dataclass(frozen=True)
class Candidate:
    """A possible cause: where, why it is suspected, and the times of all operations without it."""

    cause: str
    place: Mapping[str, int | list[int]]
    evidence: str
    work: np.ndarray
    delay: np.ndarray


def candidates(run: TraceGraph) -> list[Candidate]:
    return [*_of_computations(run), *_of_links(run)]


def _of_computations(run: TraceGraph) -> list[Candidate]:
    fit = _Fit(run)
    found = [*fit.workers(), *fit.slow_stages(), *fit.sequences()]
    return found + fit.pauses()


class _Fit:
    """log work = cell + micro-batch + rest, over all computations; a cell is a kind, chunk, stage and replica."""

    def __init__(self, run: TraceGraph) -> None:
        self.run = run
        kinds = run.column("kind")
        self.rows = np.flatnonzero(np.isin(kinds, COMPUTE_KINDS) & (run.work > 0))
        columns = {
            name: run.column(name)[self.rows] for name in ("kind", "chunk", "stage", "dp", "tp", "micro_batch", "step")
        }
        self.rank = run.column("rank")[self.rows]
        kind = np.unique(columns["kind"], return_inverse=True)[1]
        self.log = np.log(run.work[self.rows])
        position = (kind, columns["chunk"], columns["stage"], columns["dp"], columns["tp"])
        self.cell, cells = _groups(*position)
        self.cell_kind, self.cell_chunk, self.cell_stage, self.cell_dp, self.cell_tp = (
            part[cells] for part in position
        )
        self.cell_rank = self.rank[cells]
        self.cell_count = np.bincount(self.cell)
        # The optimizer's step and loading data belong to no micro-batch: their rows stand behind all others.
        self.batched = columns["micro_batch"] >= 0
        batch_of = (columns["step"][self.batched], columns["dp"][self.batched], columns["micro_batch"][self.batched])
        self.batch, batches = _groups(*batch_of)
        self.batch_dp = batch_of[1][batches]
        self.batch_rows = self.rows[self.batched][batches]
        self.effect_of_cell = np.zeros(len(cells))
        self.effect_of_batch = np.zeros(len(batches))
        for _ in range(ROUNDS):
            self.effect_of_cell = _medians(self.log - self.by_batch(), self.cell, len(cells))
            rest = (self.log - self.effect_of_cell[self.cell])[self.batched]
            self.effect_of_batch = _lower_medians(rest, self.batch)
        self.separate_replicas()
        self.rest = self.log - self.effect_of_cell[self.cell] - self.by_batch()
        self.noise = 1.4826 * float(np.median(np.abs(self.rest))) if self.rest.size else 0.0
        self.error = 1.25 * self.noise / np.sqrt(self.cell_count)  # of a median

    def by_batch(self) -> np.ndarray:
        """The micro-batch's effect on every computation."""
        found = np.zeros(len(self.log))
        if self.effect_of_batch.size:
            found[self.batched] = self.effect_of_batch[self.batch]
        return found

    def separate_replicas(self) -> None:
        """What all stages of a replica have in common is in its micro-batches, not in its workers."""
        if len(np.unique(self.cell_stage)) > 1:
            norm = self.norm_of_stage()
            for dp in np.unique(self.cell_dp):
                mine = (self.cell_dp == dp) & (self.cell_count > 1)
                batched = np.isin(np.arange(len(mine)), self.cell[self.batched])
                if (mine & batched).any():
                    common = _lower_median((self.effect_of_cell - norm)[mine & batched])
                    self.effect_of_cell[self.cell_dp == dp] -= np.where(batched[self.cell_dp == dp], common, 0.0)
                    self.effect_of_batch[self.batch_dp == dp] += common

    def norm_of_stage(self) -> np.ndarray:
        """For every cell the norm of its kind, chunk and stage over the replicas."""
        return _norms(self.effect_of_cell, _groups(self.cell_kind, self.cell_chunk, self.cell_stage)[0])

    def healed(self, correction: np.ndarray) -> np.ndarray:
        """Work with the computations' logarithms made smaller by this much."""
        work = self.run.work.copy()
        work[self.rows] *= np.exp(-correction)
        return work

    def significant(self, effect: np.ndarray, cells: np.ndarray) -> float:
        """The mean effect over some cells, by how long they take in all; 0 if noise may have made it."""
        weight = np.exp(self.effect_of_cell[cells]) * self.cell_count[cells]
        weight = weight / weight.sum()
        mean, error = float(effect[cells] @ weight), float(np.sqrt(self.error[cells] ** 2 @ weight**2))
        return mean if mean > max(LEAST_EFFECT, SIGNIFICANT * error) else 0.0

    def workers(self) -> list[Candidate]:
        effect = self.effect_of_cell - self.norm_of_stage()
        found = []
        for rank in np.unique(self.cell_rank):
            cells = np.flatnonzero(self.cell_rank == rank)
            if mean := self.significant(effect, cells):
                correction = np.where(np.isin(self.cell, cells), effect[self.cell], 0.0)
                place = {"rank": int(rank), "stage": int(self.cell_stage[cells[0]]), "dp": int(self.cell_dp[cells[0]])}
                evidence = f"its computations take {np.expm1(mean):.0%} longer than the same stage's on other replicas"
                found.append(Candidate(SLOW_WORKER, place, evidence, self.healed(correction), self.run.delay))
        return found

    def slow_stages(self) -> list[Candidate]:
        of_stage = self.norm_of_stage()
        effect = of_stage - _norms(of_stage, _groups(self.cell_kind, self.cell_chunk)[0])
        found = []
        for stage in np.unique(self.cell_stage):
            cells = np.flatnonzero(self.cell_stage == stage)
            if mean := self.significant(effect, cells):
                correction = np.where(np.isin(self.cell, cells), effect[self.cell], 0.0)
                replicas = len(np.unique(self.cell_rank[cells]))
                on_all = "on all its replicas" if replicas > 1 else "on its one replica (a slow worker looks the same)"
                evidence = f"its computations take {np.expm1(mean):.0%} longer than other stages', {on_all}"
                if stage == self.run.stages - 1 and self.run.stages > 1:
                    evidence += "; the last stage also holds the output layer and the loss"
                place = {"stage": int(stage)}
                found.append(Candidate(STAGE_IMBALANCE, place, evidence, self.healed(correction), self.run.delay))
        return found

    def sequences(self) -> list[Candidate]:
        if self.effect_of_batch.size < 2:
            return []
        samples = np.bincount(self.batch)
        by_noise = 1.57 * self.noise**2 / samples.mean()
        variance = float(self.effect_of_batch.var())
        if variance < max(2 * by_noise, 0.02**2):
            return []
        # Balanced micro-batches do the same work in all, equally spread.
        effect = (1 - by_noise / variance) * (self.effect_of_batch - self.effect_of_batch.mean())
        spread = np.zeros(len(self.log))
        spread[self.batched] = effect[self.batch]
        even = np.exp(self.effect_of_cell[self.cell])[self.batched]
        level = float(np.log((even * np.exp(spread[self.batched])).sum() / even.sum()))
        correction = np.where(self.batched, spread - level, 0.0)
        evidence = f"micro-batches differ by {np.sqrt(variance):.0%} (standard deviation), on all stages alike"
        evidence += self.by_length()
        return [Candidate(SEQUENCE_IMBALANCE, {}, evidence, self.healed(correction), self.run.delay)]

    def by_length(self) -> str:
        """How much of the micro-batches' times their sequence lengths explain, where those were recorded."""
        lengths = [self.run.records[row].lengths for row in self.batch_rows]
        if not all(lengths):
            return ""
        tokens = np.array([sum(one) for one in lengths], float)
        squares = np.array([sum(length * length for length in one) for one in lengths], float)
        seconds = np.exp(self.effect_of_batch)
        parts = []
        for name, table in (("tokens", (tokens,)), ("tokens and their squares", (tokens, squares))):
            design = np.stack([np.ones_like(tokens), *(column / max(column.max(), 1.0) for column in table)], 1)
            rest = seconds - design @ np.linalg.lstsq(design, seconds, rcond=None)[0]
            parts.append(f"{max(0.0, 1 - rest.var() / seconds.var()):.0%} of it explained by {name}")
        return "; " + ", ".join(parts)

    def pauses(self) -> list[Candidate]:
        limit = max(OUTLIER * self.noise, LEAST_OUTLIER)
        late = self.rest > limit
        correction = np.where(late, self.rest, 0.0)
        delay, delayed = _without_long_delays(self.run, float(np.median(np.exp(self.log))) if self.log.size else 0.0)
        count = int(late.sum() + delayed.sum())
        if not count:
            return []
        seconds = np.concatenate(
            [self.run.work[self.rows][late] * -np.expm1(-self.rest[late]), (self.run.delay - delay)[delayed]]
        )
        where = np.concatenate([self.rank[late], self.run.column("rank")[delayed]])
        lost = {int(rank): float(seconds[where == rank].sum()) for rank in np.unique(where)}
        ranks = [rank for rank in lost if lost[rank] > 0.2 * seconds.sum() / len(lost)]  # not where noise is a little
        share = count / max(1, len(self.rows))
        evidence = f"{count} operations ({share:.1%}) take {np.median(seconds):.3g} s longer than their peers, "
        evidence += f"on {len(ranks)} of {len(np.unique(self.rank))} ranks, not together"
        place: dict[str, int | list[int]] = {"ranks": ranks}
        return [Candidate(PAUSES, place, evidence, self.healed(correction), delay)]


def _without_long_delays(run: TraceGraph, typical: float) -> tuple[np.ndarray, np.ndarray]:
    """Delays with those that are far longer than others of their kind made as long as they; and which those were."""
    kinds = run.column("kind")
    delay = run.delay.copy()
    for kind in np.unique(kinds):
        mine = np.flatnonzero((kinds == kind) & ~run.begins)
        if not mine.size:
            continue
        middle = float(np.median(run.delay[mine]))
        spread = 1.4826 * float(np.median(np.abs(run.delay[mine] - middle)))
        long = run.delay[mine] > middle + max(OUTLIER * spread, LEAST_OUTLIER * typical)
        delay[mine[long]] = middle
    return delay, delay < run.delay


def _of_links(run: TraceGraph) -> list[Candidate]:
    """Links between stages, and groups of collectives, that are slower than others of their kind."""
    kinds = run.column("kind")
    transfers: dict[tuple[int, ...], dict[str, list[int]]] = {}
    for number, ranks in enumerate(run.link):
        if ranks:
            transfers.setdefault(ranks, {}).setdefault(str(kinds[number]), []).append(number)
    middle = {
        (ranks, kind): float(np.median(run.work[numbers]))
        for ranks, by_kind in transfers.items()
        for kind, numbers in by_kind.items()
    }
    of_kind: dict[str, list[float]] = {}
    for (_, kind), seconds in middle.items():
        of_kind.setdefault(kind, []).append(seconds)
    norm = {kind: _lower_median(np.array(seconds)) for kind, seconds in of_kind.items() if len(seconds) > 1}
    found = []
    for ranks, by_kind in transfers.items():
        slow = {kind: middle[ranks, kind] / norm[kind] for kind in by_kind if norm.get(kind, 0.0) > 0}
        if not slow or max(slow.values()) < LEAST_LINK:
            continue
        work = run.work.copy()
        for kind, factor in slow.items():
            work[by_kind[kind]] /= max(1.0, factor)
        between = set(by_kind) & {*SEND_KINDS, *RECEIVE_KINDS}
        what = "between stages" if between else "in collectives"
        evidence = f"its transfers {what} take {max(slow.values()):.1f} times as long as on other links"
        if not between:
            evidence = f"its {', '.join(sorted(slow))} take {max(slow.values()):.1f} times as long as in other groups"
        found.append(Candidate(SLOW_LINK, {"ranks": list(ranks)}, evidence, work, run.delay))
    return found


def _groups(*keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows with equal keys get the same number, from 0; and of each number one row."""
    if not keys[0].size:
        return np.zeros(0, int), np.zeros(0, int)
    _, rows, numbers = np.unique(np.stack(keys, 1), axis=0, return_index=True, return_inverse=True)
    return numbers.reshape(-1), rows


def _medians(values: np.ndarray, group: np.ndarray, count: int) -> np.ndarray:
    """The median of each group; every group has a value."""
    order = np.lexsort((values, group))
    sizes = np.bincount(group, minlength=count)
    begins = np.cumsum(sizes) - sizes
    ordered = values[order]
    return (ordered[begins + (sizes - 1) // 2] + ordered[begins + sizes // 2]) / 2


def _lower_medians(values: np.ndarray, group: np.ndarray) -> np.ndarray:
    """The lower median of each group: with two stages, two pauses among four computations are still outliers."""
    order = np.lexsort((values, group))
    sizes = np.bincount(group)
    return values[order][np.cumsum(sizes) - sizes + (sizes - 1) // 2]


def _norms(values: np.ndarray, group: np.ndarray) -> np.ndarray:
    """For each value the lower median of its group."""
    return _lower_medians(values, group)[group]


def _lower_median(values: np.ndarray) -> float:
    return float(np.sort(values)[(len(values) - 1) // 2])
