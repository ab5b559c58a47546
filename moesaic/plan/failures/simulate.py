"""Plays failures, repairs, checkpoints and restarts of a run one by one: `failures.goodput` is what to expect of it."""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from dataclasses import dataclass

from moesaic.plan.failures.goodput import FailureModel, Redundancy, active_nodes


@dataclass(frozen=True)
class SimulatedGoodput:
    goodput: float
    standard_error: float
    failures: int


def simulate_failures(
    model: FailureModel, interval_seconds: float, days: float = 365.0, runs: int = 20, seed: int = 0
) -> SimulatedGoodput:
    """The mean over runs of so many days, and how far it may be off."""
    source = random.Random(seed)
    play = _play if model.redundancy is None else _play_redundant
    found = [play(model, interval_seconds, days * 86400, source) for _ in range(runs)]
    shares = [useful / (days * 86400) for useful, _ in found]
    mean = sum(shares) / runs
    variance = sum((share - mean) ** 2 for share in shares) / max(1, runs - 1)
    return SimulatedGoodput(mean, math.sqrt(variance / runs), sum(failures for _, failures in found))


def _kept(model: FailureModel, interval: float, trained: float) -> float:
    """Of seconds since a restart those up to the last checkpoint that was written to its end."""
    segment = interval + model.checkpoint_seconds
    return max(0, math.floor((trained - model.write_seconds) / segment + 1e-12)) * segment


def _play(model: FailureModel, interval: float, length: float, source: random.Random) -> tuple[float, int]:
    share = interval / (interval + model.checkpoint_seconds)  # of the time between restarts that is training
    now = useful = 0.0
    away = failures = 0
    while now < length:
        nodes = active_nodes(model, away)
        if not nodes:
            now += source.expovariate(away / model.repair_seconds)
            away -= 1
            continue
        if now:  # every stretch but the first begins with a restart, which may fail too
            failure = source.expovariate(nodes / model.node_mtbf_seconds)
            if failure < model.restart_seconds:
                now += failure + model.detection_seconds
                failures += 1
                away += model.spares is not None
                continue
            now += model.restart_seconds
        failure = source.expovariate(nodes / model.node_mtbf_seconds)
        trained = 0.0
        grown = False
        while away:  # repairs come in beside it, and one that lets the job grow interrupts it
            repair = source.expovariate(away / model.repair_seconds)
            if trained + repair >= failure:
                break
            trained += repair
            away -= 1
            if active_nodes(model, away) > nodes:
                grown = True
                break
        trained = min(trained if grown else failure, max(0.0, length - now))
        over = now + trained >= length
        kept = trained if grown or over else _kept(model, interval, trained)
        useful += kept * share * nodes / model.nodes
        now += trained
        if grown:
            now += model.checkpoint_seconds
        elif not over:
            failures += 1
            now += model.detection_seconds
            away += model.spares is not None
    return useful, failures


def _play_redundant(model: FailureModel, interval: float, length: float, source: random.Random) -> tuple[float, int]:
    redundancy = model.redundancy or Redundancy()
    share = interval / (interval + model.checkpoint_seconds) * (1 - redundancy.overhead)
    rate = model.failures_per_second
    now = useful = 0.0
    failures = 0
    while now < length:
        if now:
            while (failure := source.expovariate(rate)) < model.restart_seconds:
                now += failure + model.detection_seconds
            now += model.restart_seconds
        course = _Course(share, redundancy.slowdown)
        gone: list[tuple[float, int]] = []  # when it is replaced, in seconds trained, and where
        while True:
            failure = course.trained + source.expovariate(rate)
            while gone and gone[0][0] <= failure:
                course.train(gone[0][0], degraded=True)
                gone.pop(0)
                now += redundancy.failover_seconds
            course.train(failure, degraded=bool(gone))
            failures += 1
            place = source.randrange(model.nodes)
            if model.nodes == 1 or any((place - other) % model.nodes in (1, model.nodes - 1) for _, other in gone):
                useful += course.worth(_kept(model, interval, failure))
                now += failure + model.detection_seconds
                break
            gone.append((failure + redundancy.replace_seconds, place))
            now += redundancy.failover_seconds
            if now + failure >= length:
                useful += course.worth(max(0.0, length - now))
                now = length
                break
    return useful, failures


class _Course:
    """How much training was worth as it went on, slower while a stage does a neighbour's work too."""

    def __init__(self, share: float, slowdown: float) -> None:
        self.share, self.slowdown = share, slowdown
        self.seconds, self.worths = [0.0], [0.0]

    @property
    def trained(self) -> float:
        return self.seconds[-1]

    def train(self, until: float, degraded: bool) -> None:
        speed = (1 - self.slowdown if degraded else 1.0) * self.share
        self.worths.append(self.worths[-1] + (until - self.trained) * speed)
        self.seconds.append(until)

    def worth(self, until: float) -> float:
        """Of the first so many seconds."""
        after = bisect_left(self.seconds, until)
        if after in (0, len(self.seconds)):
            return self.worths[min(after, len(self.seconds) - 1)]
        start, end = self.seconds[after - 1 : after + 1]
        before, behind = self.worths[after - 1 : after + 1]
        return before + (behind - before) * (until - start) / (end - start)
