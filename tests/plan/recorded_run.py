"""A training run that never took place, recorded: ranks that compute, send and synchronise, with one cause planted.

Written as ranks with clocks and links with queues, without the product's graphs, schedules or statistics, so that the
analysis is judged by what it did not make. The same run without the plant, with the same noise, is the truth.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from moesaic.plan.timeline.trace import Record, Trace

CAUSES = (
    "slow worker",
    "stage imbalance",
    "sequence-length imbalance",
    "garbage-collection pauses",
    "slow link",
)


@dataclass(frozen=True)
class Job:
    seed: int
    pp: int
    dp: int
    chunks: int
    micro_batches: int
    steps: int
    noise: float  # standard deviation of every operation's time
    tails: str  # how the noise is spread: normal, lognormal or laplace
    skew: float  # by how much the ranks' clocks differ, in seconds
    backward: float  # by forward
    send: float  # seconds, by a forward of 1
    collective: float
    blocking: bool  # sends hold up the sender, and receives are not recorded
    names: bool  # streams, dp and lengths are recorded

    def rank(self, stage: int, replica: int) -> int:
        return replica * self.pp + stage


def spread(job: Job, random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Factors near one."""
    if job.tails == "lognormal":
        return np.exp(job.noise * random.standard_normal(shape))
    draws = random.laplace(0, 0.5**0.5, shape) if job.tails == "laplace" else random.standard_normal(shape)
    return np.maximum(0.3, 1 + job.noise * draws)


@dataclass(frozen=True)
class Plant:
    """What is made slow."""

    worker: dict[tuple[int, int], float] = field(default_factory=dict)  # factors, by stage and replica
    layer: dict[tuple[int, int], float] = field(default_factory=dict)  # more work, by stage and chunk, in forwards
    # Seconds by step, stage, replica, micro-batch and chunk of a forward: within it, or, if negative, before it.
    pauses: dict[tuple[int, ...], float] = field(default_factory=dict)
    batch: np.ndarray | None = None  # step, replica, micro-batch
    links: dict[frozenset[int], float] = field(default_factory=dict)
    groups: dict[int, float] = field(default_factory=dict)  # collectives of a stage
    lengths: dict[tuple[int, int, int], tuple[int, ...]] = field(default_factory=dict)


class Link:
    """Messages from one rank to another, one at a time; a message moves when it is ready and asked for."""

    def __init__(self) -> None:
        self.ready: list[float] = []
        self.taken = 0
        self.free = 0.0


def program(job: Job, stage: int) -> list[tuple[str, int, int]]:
    """(what, micro-batch, chunk) of one step on a stage, by counting what is under way."""
    if job.chunks == 1:
        order, under_way, forwards, backwards = [], 0, 0, 0
        while backwards < job.micro_batches:
            if under_way < job.pp - stage and forwards < job.micro_batches:
                order.append(("forward", forwards, 0))
                forwards, under_way = forwards + 1, under_way + 1
            else:
                order.append(("backward", backwards, 0))
                backwards, under_way = backwards + 1, under_way - 1
        return order
    ahead = [
        (micro_batch, chunk)
        for first in range(0, job.micro_batches, job.pp)
        for chunk in range(job.chunks)
        for micro_batch in range(first, first + job.pp)
    ]
    back = [(micro_batch, job.chunks - 1 - chunk) for micro_batch, chunk in ahead]
    under_way = 2 * (job.pp - 1 - stage) + (job.chunks - 1) * job.pp + 1
    order, held = [], 0
    forward, backward = iter(ahead), iter(back)
    left = len(ahead)
    for _ in range(2 * len(ahead)):
        if left and held < under_way:
            order.append(("forward", *next(forward)))
            held, left = held + 1, left - 1
        else:
            order.append(("backward", *next(backward)))
            held -= 1
    return order


def record(job: Job, plant: Plant, keep: bool = True) -> tuple[Trace, float]:
    """The trace (empty unless it is to be kept), and how long it took."""
    random = np.random.default_rng(job.seed)
    shape = (job.steps, job.pp, job.dp, job.micro_batches, job.chunks)
    kinds = ("forward", "backward")

    def near_one() -> list[float]:  # flat: looked up one by one, a list is far faster than an array
        return spread(job, random, shape).reshape(-1).tolist()

    noise = {kind: near_one() for kind in kinds}
    sends = {kind: near_one() for kind in kinds}
    ends = spread(job, random, (3, job.steps, job.pp, job.dp)).tolist()
    gaps = (0.004 * random.random(shape)).reshape(-1).tolist()
    silicon = (1 + 0.004 * random.standard_normal((job.pp, job.dp))).tolist()  # no two devices are quite the same
    stages = (1 + 0.006 * random.standard_normal(job.pp)).tolist()  # nor two stages
    clocks = (job.skew * random.random(job.pp * job.dp)).tolist()
    virtual_stages = job.pp * job.chunks
    programs = {
        (stage, replica): [
            (step, *item)
            for step in range(job.steps)
            for item in [("all_gather", 0, 0), *program(job, stage), ("reduce_scatter", 0, 0), ("optimizer", 0, 0)]
        ]
        for stage in range(job.pp)
        for replica in range(job.dp)
    }
    clock = dict.fromkeys(programs, 0.0)
    began = dict.fromkeys(programs, 0.0)  # the step: receives are posted from then on
    position = dict.fromkeys(programs, 0)
    links: dict[tuple, Link] = {}
    waiting: dict[tuple, list[tuple[int, int]]] = {}
    found: list[Record] = []

    def note(kind: str, where: tuple[int, int], start: float, end: float, step: int, **rest: int) -> None:
        if not keep:
            return
        stage, replica = where
        stream = None
        if job.names:
            stream = "compute" if job.blocking or kind in ("forward", "backward", "optimizer") else f"nccl {kind}"
        start, end = start + clocks[job.rank(*where)], end + clocks[job.rank(*where)]
        known = {"dp": replica} if job.names else {}
        lengths = plant.lengths.get((step, replica, rest.get("micro_batch", -1)), ()) if kind == "forward" else ()
        found.append(
            Record(job.rank(*where), kind, start, end, step, stage, stream=stream, lengths=lengths, **known, **rest)
        )

    def compute(where: tuple[int, int], step: int, kind: str, micro_batch: int, chunk: int) -> bool:
        stage, replica = where
        virtual = chunk * job.pp + stage
        index = (((step * job.pp + stage) * job.dp + replica) * job.micro_batches + micro_batch) * job.chunks + chunk
        towards = 1 if kind == "forward" else -1
        place = {"micro_batch": micro_batch, "chunk": chunk}
        start = clock[where]
        if 0 <= virtual - towards < virtual_stages:
            source = (virtual - towards) % job.pp
            link = links.setdefault((kind, source, stage, replica), Link())
            if link.taken >= len(link.ready):
                return False
            ready = link.ready[link.taken]
            link.taken += 1
            slow = plant.links.get(frozenset({job.rank(source, replica), job.rank(stage, replica)}), 1.0)
            seconds = job.send * slow * sends[kind][index]
            if job.blocking:
                arrival = ready  # the sender has already paid for it
            else:
                issued = max(ready, link.free)
                posted = max(began[where], link.free)
                arrival = max(issued, posted) + seconds
                link.free = arrival
                sender_chunk = (virtual - towards) // job.pp
                note(
                    f"send_{kind}",
                    (source, replica),
                    issued,
                    arrival,
                    step,
                    micro_batch=micro_batch,
                    chunk=sender_chunk,
                )
                note(f"recv_{kind}", where, posted, arrival, step, **place)
            start = max(start, arrival)
        seconds = (1.0 if kind == "forward" else job.backward) / job.chunks
        seconds *= noise[kind][index] * silicon[stage][replica] * stages[stage] * plant.worker.get(where, 1.0)
        if plant.layer:
            more = plant.layer.get((stage, chunk), 0.0)
            seconds += more * (1.0 if kind == "forward" else job.backward) * noise[kind][index]
        if plant.batch is not None:
            seconds *= plant.batch[step, replica, micro_batch]
        start += gaps[index]
        pause = plant.pauses.get((step, stage, replica, micro_batch, chunk), 0.0) if kind == "forward" else 0.0
        start += max(0.0, -pause)  # between two operations
        seconds += max(0.0, pause)  # or within one
        end = start + seconds
        note(kind, where, start, end, step, **place)
        clock[where] = end
        if 0 <= virtual + towards < virtual_stages:
            target = (virtual + towards) % job.pp
            link = links.setdefault((kind, stage, target, replica), Link())
            if job.blocking:
                slow = plant.links.get(frozenset({job.rank(stage, replica), job.rank(target, replica)}), 1.0)
                clock[where] = end + job.send * slow * sends[kind][index]
                note(f"send_{kind}", where, end, clock[where], step, **place)
            link.ready.append(clock[where])
        return True

    def synchronise(where: tuple[int, int], step: int, kind: str) -> bool:
        stage, replica = where
        here = waiting.setdefault((kind, step, stage), [])
        if where not in here:
            here.append(where)
        if len(here) < job.dp:
            return False
        row = 0 if kind == "all_gather" else 1
        latest = max(clock[one] for one in here)
        for one in here:
            end = latest + job.collective * plant.groups.get(stage, 1.0) * ends[row][step][stage][0]
            note(kind, one, clock[one], end, step)
            clock[one] = end
            position[one] += 1
        return False  # positions are moved here

    moved = True
    while moved:
        moved = False
        for where, items in programs.items():
            while position[where] < len(items):
                step, what, micro_batch, chunk = items[position[where]]
                before = position[where]
                if what in ("all_gather", "reduce_scatter"):
                    if job.dp == 1 or not job.collective:
                        position[where] += 1
                    else:
                        synchronise(where, step, what)
                    if what == "all_gather" and position[where] > before:
                        began[where] = clock[where]
                elif what == "optimizer":
                    seconds = 0.5 * ends[2][step][where[0]][where[1]]
                    note("optimizer", where, clock[where], clock[where] + seconds, step)
                    clock[where] += seconds
                    began[where] = clock[where]
                    position[where] += 1
                elif compute(where, step, what, micro_batch, chunk):
                    position[where] += 1
                if position[where] == before:
                    break
                moved = True
    assert all(position[where] == len(items) for where, items in programs.items()), "the run is stuck"
    return Trace.of(found), max(clock.values())


@dataclass(frozen=True)
class Case:
    job: Job
    cause: str
    place: dict[str, int | list[int]]
    trace: Trace
    seconds: float
    truth: float  # of the same run without the plant


def case(seed: int) -> Case:
    """A random job with a random cause. Sizes begin at 8 %: of computations for workers and stages, else of the run."""
    random = np.random.default_rng([seed, 77])
    cause = CAUSES[seed % len(CAUSES)]
    chunks = int(random.choice([1, 1, 2]))
    pp, dp = int(random.integers(2, 9)), int(random.integers(1, 9))
    micro_batches = int(random.integers(4, 33))
    if chunks > 1:
        micro_batches = max(1, micro_batches // pp) * pp
    if cause == "slow worker":
        dp = max(2, dp)  # with one replica it is what a slow stage is
    if cause == "sequence-length imbalance":
        dp = max(2, dp)  # balanced in all, one replica's micro-batches cost little
    if cause == "slow link" and (pp - 1) * dp < 2:
        pp = 3
    job = Job(
        seed=seed,
        pp=pp,
        dp=dp,
        chunks=chunks,
        micro_batches=micro_batches,
        steps=int(random.integers(2, 5)),
        noise=float(random.uniform(0.01, 0.05)),
        tails=str(random.choice(["normal", "lognormal", "laplace"])),
        skew=float(random.choice([0.0, 0.005])),
        backward=float(random.uniform(1.6, 2.4)),
        send=float(random.uniform(0.01, 0.1)),
        collective=float(random.choice([0.0, random.uniform(0.3, 3.0)])),
        blocking=bool(random.random() < 0.3),
        names=bool(random.random() < 0.5),
    )
    size = float(random.choice([random.uniform(0.08, 0.15), random.uniform(0.08, 0.5)]))
    truth = record(job, Plant(), keep=False)[1]
    place: dict[str, int | list[int]] = {}
    if cause == "slow worker":
        where = (int(random.integers(pp)), int(random.integers(dp)))
        plant = Plant(worker={where: 1 + size})
        place = {"rank": job.rank(*where)}
    elif cause == "stage imbalance":
        stage = pp - 1 if random.random() < 0.6 else int(random.integers(pp))
        # All its layers, or one more in its last chunk, as the loss is.
        longer = {(stage, chunk): size / chunks for chunk in range(chunks)}
        plant = Plant(layer=longer if random.random() < 0.5 else {(stage, chunks - 1): size})
        place = {"stage": stage}
    elif cause == "sequence-length imbalance":
        plant = _grown(job, truth, min(size, 0.12), lambda strength: _long_sequences(job, strength), 0.2)
    elif cause == "garbage-collection pauses":
        cells = [tuple(int(part) for part in cell) for cell in np.ndindex(job.steps, pp, dp, job.micro_batches, chunks)]
        count = max(2, round(random.uniform(0.01, 0.05) * len(cells)))
        chosen = [cells[number] for number in random.choice(len(cells), count, replace=False)]
        lengths = random.uniform(0.8, 1.2, count) * (-1.0 if random.random() < 0.4 else 1.0)
        plant = _grown(
            job,
            truth,
            size,
            lambda strength: Plant(pauses={cell: strength * float(length) for cell, length in zip(chosen, lengths)}),
            0.5,
        )
        place = {"ranks": sorted({job.rank(stage, replica) for _, stage, replica, _, _ in chosen})}
    elif dp > 1 and job.collective and random.random() < 0.4:
        stage = int(random.integers(pp))
        plant = _grown(job, truth, size, lambda strength: Plant(groups={stage: 1 + strength}), 0.5)
        place = {"ranks": sorted(job.rank(stage, replica) for replica in range(dp))}
    else:
        stage, replica = int(random.integers(pp - 1)), int(random.integers(dp))
        ends = [job.rank(stage, replica), job.rank(stage + 1, replica)]
        plant = _grown(job, truth, size, lambda strength: Plant(links={frozenset(ends): 1 + strength}), 1.0)
        place = {"ranks": sorted(ends)}
    trace, seconds = record(job, plant)
    return Case(job, cause, place, trace, seconds, truth)


def _grown(job: Job, truth: float, size: float, plant: Callable[[float], Plant], strength: float) -> Plant:
    """The plant at the strength at which the run takes `size` longer."""
    for _ in range(40):
        made = plant(strength)
        if record(job, made, keep=False)[1] >= (1 + size) * truth:
            return made
        strength *= 1.5
    raise AssertionError("the plant does not slow the run down")


def _long_sequences(job: Job, strength: float) -> Plant:
    """Micro-batches packed to equal numbers of tokens: what differs is the attention, quadratic in lengths."""
    random = np.random.default_rng([job.seed, 5])
    tokens = 32768
    shape = (job.steps, job.dp, job.micro_batches)
    lengths: dict[tuple[int, int, int], tuple[int, ...]] = {}
    squares = np.zeros(shape)
    for cell in np.ndindex(shape):
        left, packed = tokens, []
        while left:
            packed.append(min(left, 1 + int(random.lognormal(7.0, 0.8 + min(strength, 1.2)))))
            left -= packed[-1]
        lengths[cell] = tuple(packed)
        squares[cell] = sum(length**2 for length in packed)
    share = min(0.9, strength)  # of attention in the time of an average micro-batch
    factors = 1 - share + share * squares / squares.mean()
    return replace(Plant(batch=factors), lengths=lengths if job.names else {})
