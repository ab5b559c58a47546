"""Goodput of a run on machines that fail: checkpoints, restarts, spare nodes, elastic restarts, redundant stages.

Failures come at random (exponentially, per node). `goodput` is analytic: exact for checkpoint and restart (a renewal
argument, with checkpoints written in the background and failures during restarts), and an average over how many nodes
are away where spares run out, nodes are repaired or jobs shrink. `simulate.py` plays the same process. The
redundancy is that of "Bamboo: Making Preemptible Instances Resilient" (Thorpe et al., 2023): each pipeline stage also
holds its neighbour's layers, and takes over when that one is gone; work is lost only if two neighbours are.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from moesaic.errors import UserError

DAY = 86400.0


@dataclass(frozen=True)
class Redundancy:
    """Each stage keeps its neighbour's layers: what that costs always, when a node leaves, and until it is replaced."""

    overhead: float = 0.05  # of a step: the redundant computation that does not fit into pipeline bubbles
    failover_seconds: float = 30.0  # to reroute, when a node leaves and when another takes its place
    slowdown: float = 0.2  # of a step while a stage does a neighbour's work too
    replace_seconds: float = 600.0  # until another node has taken the place
    memory_factor: float = 2.0  # of parameters, gradients and optimizer state


@dataclass(frozen=True)
class FailureModel:
    """Machines and what happens when one fails. Times in seconds."""

    nodes: int  # that the job wants
    node_mtbf_seconds: float
    checkpoint_seconds: float  # in which training stands still for a checkpoint
    write_seconds: float = 0.0  # after that, in the background, until it can be restarted from
    detection_seconds: float = 60.0
    restart_seconds: float = 300.0
    spares: int | None = None  # None: there is always another node
    repair_seconds: float = 0.0  # on average, until a failed node is back
    elastic: bool = False  # without a spare, go on with fewer nodes
    replica_nodes: int = 1  # of one data-parallel replica: by so many an elastic job shrinks
    redundancy: Redundancy | None = None

    def __post_init__(self) -> None:
        if self.nodes < 1:
            raise UserError("nodes", f"is {self.nodes}", "There is at least one.")
        if not 0 < self.node_mtbf_seconds < math.inf:
            raise UserError(
                "the mean time between failures", f"is {self.node_mtbf_seconds}", "It must be above 0, and finite."
            )
        for name in ("checkpoint_seconds", "write_seconds", "detection_seconds", "restart_seconds", "repair_seconds"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UserError(name, f"is {getattr(self, name)}", "It must be a number of seconds, not negative.")
        if self.spares is not None and self.spares < 0:
            raise UserError("spares", f"is {self.spares}", "It must not be negative.")
        if self.spares is not None and not self.repair_seconds:
            raise UserError("repair_seconds", "is 0 with a limited number of spares", "How long is a repair?")
        if self.elastic and self.spares is None:
            raise UserError(
                "elastic", "needs a number of spares", "Without spares that is 0; else no job ever shrinks."
            )
        if not 1 <= self.replica_nodes <= self.nodes:
            problem = f"is {self.replica_nodes} of {self.nodes} nodes"
            raise UserError("replica_nodes", problem, "A data-parallel replica is a part of the job.")

    @property
    def failures_per_second(self) -> float:
        return self.nodes / self.node_mtbf_seconds


@dataclass(frozen=True)
class Goodput:
    """Shares of the time, which add up to 1, and how often something fails."""

    interval_seconds: float  # of training between checkpoints
    goodput: float  # training that counts
    checkpoints: float
    lost_work: float  # done twice
    downtime: float  # noticing and restarting
    waiting: float  # for a repair, or training with fewer nodes
    redundancy: float  # computing, and rerouting, for a neighbour
    failures_per_day: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def node_mtbf_seconds(gpu_mtbf_hours: float, gpus_per_node: int = 8) -> float:
    """A node fails when one of its GPUs does."""
    return gpu_mtbf_hours * 3600 / gpus_per_node


def observed_node_mtbf_seconds(interruptions: int, days: float, nodes: int) -> float:
    """From what a run has seen: Llama 3 405B had 466 interruptions in 54 days on 2048 nodes of 8 GPUs."""
    return days * DAY * nodes / interruptions


def goodput(model: FailureModel, interval_seconds: float) -> Goodput:
    """Where the time goes with a checkpoint after every so many seconds of training."""
    if not interval_seconds > 0:
        raise UserError("the checkpoint interval", f"is {interval_seconds} seconds", "It must be above 0.")
    if model.write_seconds > interval_seconds + model.checkpoint_seconds:
        problem = f"of {interval_seconds:g} s is shorter than the {model.write_seconds:g} s that writing one takes"
        raise UserError("the checkpoint interval", problem, "Make it longer, or write faster.")
    if model.redundancy is not None:
        return _redundant(model, model.redundancy, interval_seconds)
    if model.spares is None:
        return _renewal(model, interval_seconds, model.failures_per_second)
    return _averaged(model, interval_seconds)


def best_interval(model: FailureModel) -> Goodput:
    """The checkpoint interval with the highest goodput, found on the analytic expression."""
    least = max(1.0, model.write_seconds - model.checkpoint_seconds)
    if not model.checkpoint_seconds:  # nothing speaks against the next checkpoint but the writing of the last
        return goodput(model, least)
    low, high = math.log(least), math.log(max(2 * least, 100 * young_interval(model), 10 * DAY))
    golden = (math.sqrt(5) - 1) / 2
    for _ in range(80):
        left, right = high - golden * (high - low), low + golden * (high - low)
        if goodput(model, math.exp(left)).goodput < goodput(model, math.exp(right)).goodput:
            low = left
        else:
            high = right
    return goodput(model, math.exp((low + high) / 2))


def young_interval(model: FailureModel) -> float:
    """Young's first-order rule: the square root of twice the checkpoint's cost times the time between failures."""
    return math.sqrt(2 * model.checkpoint_seconds / model.failures_per_second)


def daly_interval(model: FailureModel) -> float:
    """Daly's higher-order rule, for a checkpoint that costs less than twice the time between failures."""
    cost, between = model.checkpoint_seconds, 1 / model.failures_per_second
    if cost >= 2 * between:
        return between
    ratio = math.sqrt(cost / (2 * between))
    return math.sqrt(2 * cost * between) * (1 + ratio / 3 + ratio**2 / 9) - cost


def _renewal(model: FailureModel, interval: float, rate: float) -> Goodput:
    """Exact: from the moment one checkpoint can be restarted from to the moment the next can.

    That takes a segment (training and the checkpoint's pause) if nothing fails. If something does, training goes back
    to the start of its segment and has to survive it and the background write in one go, again and again.
    """
    segment = interval + model.checkpoint_seconds
    whole = segment + model.write_seconds
    if rate * (whole + model.restart_seconds) > 500:  # no checkpoint is ever reached
        return Goodput(interval, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, rate * DAY)
    restarts = math.expm1(rate * model.restart_seconds)  # that fail too, for each that succeeds
    between = 1 / rate + model.detection_seconds
    down = model.detection_seconds + restarts * between  # after a failure, until training goes on
    fails = -math.expm1(-rate * segment)
    failures = fails * math.exp(rate * whole)  # while training, for each checkpoint
    seconds = fails / rate + fails * (down + math.expm1(rate * whole) * (1 / rate + down))
    useful, checkpoint, stopped = interval / seconds, model.checkpoint_seconds / seconds, failures * down / seconds
    lost = max(0.0, 1 - useful - checkpoint - stopped)
    return Goodput(interval, useful, checkpoint, lost, stopped, 0.0, 0.0, failures * (1 + restarts) / seconds * DAY)


def _averaged(model: FailureModel, interval: float) -> Goodput:
    """Over how many nodes are away: a chain of failures and repairs, slow beside checkpoints and restarts."""
    spares = model.spares or 0
    logs, active, highest = [0.0], [model.nodes], 0.0  # of unscaled probabilities
    for away in range(1, model.nodes + spares + 1):
        failing = active[-1] / model.node_mtbf_seconds
        logs.append(logs[-1] + math.log(failing * model.repair_seconds / away))
        active.append(active_nodes(model, away))
        highest = max(highest, logs[-1])
        if not active[-1] or logs[-1] < highest - 30:  # stands still until a repair; or does not happen
            break
    weights = [math.exp(log - highest) for log in logs]
    total = sum(weights)
    parts = []
    for away, (weight, nodes) in enumerate(zip(weights, active)):
        share = weight / total
        if not nodes:
            parts.append((share, Goodput(interval, 0, 0, 0, 0, 1.0, 0, 0)))
            continue
        found = _renewal(model, interval, nodes / model.node_mtbf_seconds)
        speed = nodes / model.nodes
        # A node that comes back is taken in by a planned restart: a checkpoint and the restart, and nothing lost.
        grows = away and active_nodes(model, away - 1) > nodes
        planned = away / model.repair_seconds * (model.checkpoint_seconds + model.restart_seconds) if grows else 0.0
        running = 1 / (1 + planned)
        shares = {
            "goodput": found.goodput * running * speed,
            "checkpoints": found.checkpoints * running,
            "lost_work": found.lost_work * running,
            "downtime": found.downtime * running + 1 - running,
            "waiting": found.goodput * running * (1 - speed),
            "failures_per_day": found.failures_per_day * running,
        }
        parts.append((share, replace(found, **shares)))
    names = ("goodput", "checkpoints", "lost_work", "downtime", "waiting", "redundancy", "failures_per_day")
    return Goodput(interval, *(sum(share * getattr(part, name) for share, part in parts) for name in names))


def active_nodes(model: FailureModel, away: int) -> int:
    """How many nodes train while so many are away."""
    healthy = model.nodes + (model.spares or 0) - away
    if healthy >= model.nodes:
        return model.nodes
    if not model.elastic:
        return 0
    # Whole replicas; the last one may be smaller from the start, and leaves first.
    return max(0, healthy // model.replica_nodes * model.replica_nodes)


def _redundant(model: FailureModel, redundancy: Redundancy, interval: float) -> Goodput:
    """A failure is fatal if one of two neighbours is away too; else it costs rerouting, and some speed for a while."""
    rate = model.failures_per_second
    together = -math.expm1(-2 * redundancy.replace_seconds / model.node_mtbf_seconds) if model.nodes > 1 else 1.0
    fatal = _renewal(model, interval, rate * together)
    rerouting = 2 * redundancy.failover_seconds * rate * (1 - together)  # by the time spent training
    running = 1 / (1 + rerouting)
    degraded = -math.expm1(-rate * redundancy.replace_seconds)
    speed = (1 - redundancy.overhead) * (1 - redundancy.slowdown * degraded)
    return Goodput(
        interval_seconds=interval,
        goodput=fatal.goodput * running * speed,
        checkpoints=fatal.checkpoints * running,
        lost_work=fatal.lost_work * running,
        downtime=fatal.downtime * running,
        waiting=0.0,
        redundancy=1 - running + fatal.goodput * running * (1 - speed),
        failures_per_day=rate * running * DAY,
    )
