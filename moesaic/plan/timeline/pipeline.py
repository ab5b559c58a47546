"""Pipeline schedules of one training step: GPipe, 1F1B, interleaved 1F1B and zero-bubble ZB-H1.

`Pipeline.operations` are for `events.simulate`, a trace, a Gantt chart; `Pipeline.time` says only how long they take,
by the same recurrence over all ranks at once. Stages may be uneven. With p ranks, v chunks a rank and virtual stage
`chunk * p + rank`, a send goes from each virtual stage to the next (activations) and back (gradients); where sends
overlap they occupy one stream a direction, else the sender's compute stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np

from moesaic.errors import UserError
from moesaic.plan.timeline.events import Operation

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1")
COMPUTE, SEND_FORWARD, SEND_BACKWARD = "compute", "send_forward", "send_backward"  # streams
KINDS = ("forward", "backward", "weight_gradient")
FORWARD, BACKWARD, WEIGHT = range(3)
MANY = 32  # ranks from which on numpy is faster than plain Python

Seconds = Sequence[Sequence[float]] | Sequence[float] | np.ndarray  # by rank and chunk, or by rank


@dataclass(frozen=True)
class PipelineTime:
    """How long a step takes, and what of it each rank computes (or, where sends do not overlap, sends)."""

    makespan: float
    compute_seconds: list[float]

    @property
    def bubble(self) -> float:
        """Share of all ranks' time in which they do not compute."""
        whole = self.makespan * len(self.compute_seconds)
        return 1 - sum(self.compute_seconds) / whole if whole else 0.0

    @property
    def bubble_over_compute(self) -> float:
        """Idle time by compute time, the textbooks' bubble: (p - 1) / m for 1F1B."""
        compute = sum(self.compute_seconds)
        return self.makespan * len(self.compute_seconds) / compute - 1 if compute else 0.0


@dataclass(frozen=True, eq=False)
class Pipeline:
    """The micro-batches of one step through the stages.

    `forward_seconds[rank][chunk]` and `backward_seconds` (all of the backward pass) are of one micro-batch; ZB-H1
    takes `weight_seconds` out of the backward (half of it unless told) and runs it later. `send_seconds` is of one
    message, or one number per rank: of its link to the next rank, in both directions (the last rank's next is the
    first, of the next chunk). `micro_batch_scale` multiplies each micro-batch's times.
    """

    forward_seconds: Seconds
    backward_seconds: Seconds
    send_seconds: float | Sequence[float]
    micro_batches: int
    schedule: str = "1f1b"
    overlap_send: bool = True
    weight_seconds: Seconds | None = None
    micro_batch_scale: Sequence[float] | None = None

    def time(self) -> PipelineTime:
        """The makespan of `operations`, without making them."""
        step = self._step()
        makespan = (_one_by_one if step.order.ranks < MANY else _by_wave)(step, self.overlap_send)
        compute = np.bincount(step.order.rank, step.seconds, step.order.ranks)
        return PipelineTime(makespan, compute.tolist())

    def operations(
        self, first_id: int = 0, ranks: Sequence[int] | None = None, step: int | None = None
    ) -> list[Operation]:
        """Each after what it waits for. The list will stand behind `first_id` others; `ranks` are the ranks' names."""
        plan = self._step()
        order = plan.order
        chunks = int(order.chunk.max()) + 1
        names = list(range(order.ranks)) if ranks is None else list(ranks)
        streams = (SEND_FORWARD, SEND_BACKWARD) if self.overlap_send else (COMPUTE, COMPUTE)
        operations: list[Operation] = []
        arrival: list[int] = []  # for each computation the operation after which its result is where it is needed
        columns = (order.rank, order.kind, order.micro_batch, order.chunk, order.waits, order.link)
        rows = zip(*(column.tolist() for column in (*columns, plan.seconds, plan.sends)))
        for stage, kind, micro_batch, chunk, waits, link, seconds, send in rows:
            label = f"{micro_batch}.{chunk}" if chunks > 1 else f"{micro_batch}"
            after = (arrival[waits],) if waits < len(plan.seconds) else ()
            place = (micro_batch, stage, chunk, step)
            computed = first_id + len(operations)
            operations.append(
                Operation(f"{KINDS[kind]} {label}", KINDS[kind], names[stage], COMPUTE, seconds, after, *place)
            )
            if link < 2 * order.ranks:
                send_kind = f"send_{KINDS[kind]}"
                operations.append(
                    Operation(f"{send_kind} {label}", send_kind, names[stage], streams[kind], send, (computed,), *place)
                )
            arrival.append(first_id + len(operations) - 1)
        return operations

    def _step(self) -> _Step:
        forward = _by_rank_and_chunk("forward_seconds", self.forward_seconds)
        backward = _by_rank_and_chunk("backward_seconds", self.backward_seconds, forward.shape)
        weight = np.zeros_like(backward)
        if self.schedule == "zb-h1":
            weight = backward / 2
            if self.weight_seconds is not None:
                weight = _by_rank_and_chunk("weight_seconds", self.weight_seconds)
            if weight.shape != backward.shape or (weight > backward).any():
                raise UserError("weight_seconds", "is more than backward_seconds", "It is a part of the backward.")
            backward = backward - weight
        ranks, chunks = forward.shape
        links = np.asarray(self.send_seconds, float)
        if links.ndim == 0:
            links = np.broadcast_to(links, (ranks,))
        if links.shape != (ranks,):
            problem = f"has {links.size} links for {ranks} ranks"
            raise UserError("send_seconds", problem, "Give one number, or one per rank: of its link to the next.")
        if not (np.isfinite(links).all() and (links >= 0).all()):
            raise UserError("send_seconds", "is not a time", "Times are finite and not negative.")
        order = _order(self.schedule, ranks, chunks, self.micro_batches)
        seconds = np.stack([forward, backward, weight])[order.kind, order.rank, order.chunk]
        if self.micro_batch_scale is not None:
            scale = np.asarray(self.micro_batch_scale, float)
            if scale.shape != (self.micro_batches,) or not (np.isfinite(scale).all() and (scale >= 0).all()):
                problem = f"is not {self.micro_batches} factors"
                raise UserError("micro_batch_scale", problem, "Give one factor, not negative, per micro-batch.")
            seconds = seconds * scale[order.micro_batch]
        # A link's number on the way back is of the rank that sends: the link is the one of the rank before it.
        by_link = np.concatenate([links, np.roll(links, 1), [0.0]])
        return _Step(order, seconds, by_link[order.link])


def _one_by_one(step: _Step, overlap_send: bool) -> float:
    """The recurrence in plain Python: with few ranks faster than calling numpy for each wave."""
    order, count = step.order, len(step.seconds)
    free = [0.0] * order.ranks
    link = [0.0] * (
        2 * order.ranks + 1
    )  # when each rank's is free, forward and backward; the last for what is not sent
    arrived = [0.0] * (count + 1)  # when the result is where it is needed; the last for what waits for none
    columns = (order.rank, order.waits, order.link, step.seconds, step.sends)
    for number, (rank, waits, outward, seconds, send) in enumerate(zip(*(column.tolist() for column in columns))):
        ended = arrived[waits]
        if free[rank] > ended:
            ended = free[rank]
        ended += seconds
        if overlap_send:
            free[rank] = ended
            if link[outward] > ended and outward < 2 * order.ranks:
                ended = link[outward]
            ended += send
            link[outward] = ended
        else:
            ended += send
            free[rank] = ended
        arrived[number] = ended
    return max(free)


def _by_wave(step: _Step, overlap_send: bool) -> float:
    """The same, all ranks at once."""
    order = step.order
    free, link, arrived = np.zeros(order.ranks), np.zeros(2 * order.ranks + 1), np.zeros(len(step.seconds) + 1)
    for begin, end in pairwise(order.levels):
        rank = order.rank[begin:end]
        ended = np.maximum(free[rank], arrived[order.waits[begin:end]]) + step.seconds[begin:end]
        if overlap_send:
            free[rank] = ended
            outward = order.link[begin:end]
            ended = np.maximum(ended, link[outward]) + step.sends[begin:end]
            link[outward] = ended
        else:
            ended = ended + step.sends[begin:end]
            free[rank] = ended
        arrived[begin:end] = ended
    return float(free.max())


@dataclass(frozen=True)
class _Order:
    """The computations of all ranks as a wavefront: those of one level run on different ranks, after earlier levels."""

    ranks: int
    levels: list[int]  # where each level begins, and the end
    rank: np.ndarray
    kind: np.ndarray
    micro_batch: np.ndarray
    chunk: np.ndarray
    waits: np.ndarray  # the computation on another rank whose result it takes; the count of all for none
    link: np.ndarray  # rank, or ranks + rank for the way back, of the link its result is sent over; 2 * ranks for none


@dataclass(frozen=True)
class _Step:
    order: _Order
    seconds: np.ndarray  # of each computation
    sends: np.ndarray  # of sending its result


def _by_rank_and_chunk(name: str, seconds: Seconds, shape: tuple[int, ...] | None = None) -> np.ndarray:
    try:
        table = np.asarray(seconds, float)
    except ValueError:
        raise UserError(name, "has other numbers of chunks on some ranks", "Give every rank as many.") from None
    table = table[:, None] if table.ndim == 1 else table
    if table.ndim != 2 or not table.size or shape not in (None, table.shape):
        problem = f"has the shape {table.shape}" + (f", and forward_seconds has {shape}" if shape else "")
        raise UserError(name, problem, "Give one list per rank with one number per chunk.")
    if not (np.isfinite(table).all() and (table >= 0).all()):
        raise UserError(name, "holds what is not a time", "Times are finite and not negative.")
    return table


@lru_cache(maxsize=32)
def _order(schedule: str, ranks: int, chunks: int, micro_batches: int) -> _Order:
    kind_RN, micro_batch_RN, chunk_RN = _sequences(schedule, ranks, chunks, micro_batches)
    each = kind_RN.shape[1]
    count = ranks * each
    rank_RN = np.broadcast_to(np.arange(ranks)[:, None], kind_RN.shape)
    number_RN = np.arange(count).reshape(ranks, each)
    number = np.full((3, ranks * chunks, micro_batches), count)  # of each kind, virtual stage and micro-batch
    virtual_RN = chunk_RN * ranks + rank_RN
    number[kind_RN, virtual_RN, micro_batch_RN] = number_RN
    # A forward takes the result of the virtual stage before, a backward of the one behind; what the rank itself made
    # comes earlier in its own sequence, and needs no waiting.
    source_RN = virtual_RN + np.array([-1, 1, 0])[kind_RN]
    inside_RN = (source_RN >= 0) & (source_RN < ranks * chunks) & (kind_RN != WEIGHT) & (ranks > 1)
    source_RN = np.where(inside_RN, number[kind_RN, source_RN % (ranks * chunks), micro_batch_RN], count)
    target_RN = virtual_RN + np.array([1, -1, 0])[kind_RN]
    sent_RN = (target_RN >= 0) & (target_RN < ranks * chunks) & (kind_RN != WEIGHT) & (ranks > 1)
    link_RN = np.where(sent_RN, kind_RN * ranks + rank_RN, 2 * ranks)

    few = ranks < MANY
    waves = [np.array(wave) for wave in _waves(source_RN.tolist())] if few else list(_large_waves(source_RN))
    numbers = np.concatenate(waves)
    sizes = [0, *(len(wave) for wave in waves)]
    place = np.empty(count + 1, np.int32)
    place[numbers] = np.arange(count)
    place[count] = count

    def sorted_by_wave(table_RN: np.ndarray) -> np.ndarray:
        return table_RN.reshape(-1)[numbers].astype(np.int32)

    return _Order(
        ranks=ranks,
        levels=np.cumsum(sizes).tolist(),
        rank=sorted_by_wave(rank_RN),
        kind=sorted_by_wave(kind_RN),
        micro_batch=sorted_by_wave(micro_batch_RN),
        chunk=sorted_by_wave(chunk_RN),
        waits=place[sorted_by_wave(source_RN)],
        link=sorted_by_wave(link_RN),
    )


def _waves(source_RN: list[list[int]]) -> Iterator[list[int]]:
    """Computations that can run at once, in turn: on each rank the next one, if its source ran in an earlier wave."""
    each = len(source_RN[0])
    done = bytearray(len(source_RN) * each + 1)
    done[-1] = True
    position = [0] * len(source_RN)
    left = len(source_RN) * each
    while left:
        ready = [rank for rank, place in enumerate(position) if place < each and done[source_RN[rank][place]]]
        assert ready, "the schedule is stuck"
        wave = [rank * each + position[rank] for rank in ready]
        for rank, number in zip(ready, wave):
            done[number] = True
            position[rank] += 1
        left -= len(wave)
        yield wave


def _large_waves(source_RN: np.ndarray) -> Iterator[np.ndarray]:
    """The same, all ranks at once."""
    ranks, each = source_RN.shape
    done = np.zeros(ranks * each + 1, bool)
    done[-1] = True
    position = np.zeros(ranks, np.int64)
    everyone = np.arange(ranks)
    while (waiting := everyone[position < each]).size:
        ready = waiting[done[source_RN[waiting, position[waiting]]]]
        assert ready.size, "the schedule is stuck"
        wave = ready * each + position[ready]
        done[wave] = True
        position[ready] += 1
        yield wave


def _sequences(schedule: str, ranks: int, chunks: int, micro_batches: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What every rank computes, in order: kind, micro-batch and chunk."""
    if schedule not in SCHEDULES:
        raise UserError(f"schedule {schedule!r}", "is unknown", f"Known are: {', '.join(SCHEDULES)}.")
    if micro_batches < 1:
        raise UserError("micro_batches", f"is {micro_batches}", "A step has at least one micro-batch.")
    if chunks > 1 and schedule != "interleaved":
        problem = f"has one chunk a rank, and the times have {chunks}"
        raise UserError(
            f"schedule {schedule!r}", problem, "Use the schedule 'interleaved', or add up the chunks' times."
        )
    if chunks > 1 and (ranks < 2 or micro_batches % ranks):
        problem = f"cannot run {micro_batches} micro-batches on {ranks} ranks"
        remedy = "The number of micro-batches is a multiple of the number of ranks, of which there are at least two."
        raise UserError("schedule 'interleaved'", problem, remedy)
    if schedule == "zb-h1":
        rows = np.array([_zero_bubble(rank, ranks, micro_batches) for rank in range(ranks)])
        return rows[..., 0], rows[..., 1], np.zeros_like(rows[..., 0])
    # Megatron's order: ranks many micro-batches through the first chunk, the same through the next, and so on.
    count = micro_batches * chunks
    virtual = np.arange(count)
    group = ranks * chunks if chunks > 1 else 1
    chunk = virtual % group // ranks if chunks > 1 else np.zeros(count, int)
    micro_batch = virtual // group * ranks + virtual % ranks if chunks > 1 else virtual
    kinds, places = [], []
    for rank in range(ranks):
        if schedule == "gpipe":
            warmup = count
        elif chunks > 1:
            warmup = min(count, 2 * (ranks - rank - 1) + (chunks - 1) * ranks)
        else:
            warmup = min(count, ranks - rank - 1)
        steady = count - warmup
        kinds.append(
            np.concatenate([np.zeros(warmup, int), np.tile([FORWARD, BACKWARD], steady), np.ones(warmup, int)])
        )
        forwards, backwards = virtual[:warmup], virtual[steady:]
        pairs = np.stack([virtual[warmup:], virtual[:steady]], 1).reshape(-1)
        places.append(np.concatenate([forwards, pairs, backwards]))
    kind_RN, place_RN = np.array(kinds), np.array(places)
    chunk_RN = np.where(kind_RN == FORWARD, chunk[place_RN], chunks - 1 - chunk[place_RN])
    return kind_RN, micro_batch[place_RN], chunk_RN


def _zero_bubble(rank: int, ranks: int, micro_batches: int) -> list[tuple[int, int]]:
    """ZB-H1: 1F1B with weight gradients put off by `rank` micro-batches: none holds more than `ranks` activations."""
    warmup = min(micro_batches, ranks - rank - 1)
    sequence = [(FORWARD, number) for number in range(warmup)]
    for number in range(micro_batches + rank):
        if warmup + number < micro_batches:
            sequence.append((FORWARD, warmup + number))
        if number < micro_batches:
            sequence.append((BACKWARD, number))
        if 0 <= number - rank < micro_batches:
            sequence.append((WEIGHT, number - rank))
    return sequence
