"""The dependency graph behind a recorded trace, so that it can be replayed with other durations.

A rank's computations run in the order they were recorded. A forward waits for the activations of the virtual stage
before it, a backward for the gradients of the one behind. Sends, receives and collectives synchronise: the transfer
begins when the last of its peers has arrived, so its own time is the end minus the latest start, and what a peer waited
before that is nobody's work. Time between the moment an operation could start and its start is kept as its delay.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice, pairwise

import numpy as np

from moesaic.errors import UserError
from moesaic.plan.timeline.events import Graph, Operation
from moesaic.plan.timeline.trace import COLLECTIVE_KINDS, COMPUTE_KINDS, RECEIVE_KINDS, SEND_KINDS, Record, Trace

TOLERANCE = 1e-6  # seconds by which a recorded start may come before the end it waited for
BEFORE_FORWARD = ("all_gather", "broadcast", "barrier")  # parameters that are gathered before they are used
COMPUTE = "compute"
AT_ONCE = 8_000_000  # times of operations that are replayed together: what fits into some hundred MB


@dataclass
class TraceGraph:
    """Of every record its place, its own time (`work`) and its delay, and the graph that makes times of them."""

    records: list[Record]
    work: np.ndarray
    delay: np.ndarray
    link: list[tuple[int, ...]]  # the ranks of a transfer; empty for a computation
    stages: int
    graph: Graph
    work_node: np.ndarray
    delay_node: np.ndarray
    begins: np.ndarray  # whether it waits for nothing that was recorded: its delay is only when the recording began
    recorded_seconds: float
    columns: dict[str, np.ndarray] = field(default_factory=dict)

    def column(self, name: str) -> np.ndarray:
        """A field of all records; -1 where it is None."""
        if name not in self.columns:
            values = [getattr(record, name) for record in self.records]
            self.columns[name] = np.array([-1 if value is None else value for value in values])
        return self.columns[name]

    def replay(self, scenarios: Iterable[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
        """Seconds from the first start to the last end for each pair of work and delay."""
        nodes = len(self.graph.operations)
        waiting = iter(scenarios)
        found: list[float] = []
        while part := list(islice(waiting, max(1, AT_ONCE // max(1, nodes)))):
            seconds_SN = np.zeros((len(part), nodes))
            for row, (work, delay) in zip(seconds_SN, part):
                row[self.delay_node] = delay
                row[self.work_node] += work
            found += self.graph.replay(np.ascontiguousarray(seconds_SN.T)).max(axis=0).tolist()
        return np.array(found)


def trace_graph(trace: Trace) -> TraceGraph:
    records = _without_unrecorded_time(_placed(trace))
    return _Builder(records).build()


class _Builder:
    """One pass over the records; nodes are listed with the times at which the trace says they ended."""

    def __init__(self, records: list[Record]) -> None:
        self.records = records
        self.stages = 1 + max(record.stage or 0 for record in records)
        self.virtual_stages = self.stages * (1 + max(record.chunk or 0 for record in records))
        self.nodes: list[Operation] = []
        self.ended: list[float] = []  # of each node
        self.waits: list[list[int]] = []  # of each node
        count = len(records)
        self.arrive, self.done = [0] * count, [0] * count  # nodes of each record; of a computation both are the same
        self.work = np.array([record.end - record.start for record in records])
        self.link: list[tuple[int, ...]] = [()] * count

    def build(self) -> TraceGraph:
        for number, record in enumerate(self.records):
            # Each kind of transfer has its own stream: a send and a receive may be issued together, as one batch.
            stream = COMPUTE if record.kind in COMPUTE_KINDS else f"{record.stream or ''} {record.kind}"
            self.done[number] = self.arrive[number] = self.node(record, stream, record.end)
            if record.kind not in COMPUTE_KINDS:
                self.ended[-1] = record.start
                self.done[number] = self.node(record, stream, record.end)
        self.issue(_blocking(self.records))
        self.connect_stages()
        self.connect_collectives()
        operations = [node._replace(after=tuple(waits)) for node, waits in zip(self.nodes, self.waits)]
        graph = Graph(operations)
        delay = self.delays(graph)
        ends = [record.end for record in self.records]
        return TraceGraph(
            records=self.records,
            work=self.work,
            delay=delay,
            link=self.link,
            stages=self.stages,
            graph=graph,
            work_node=np.array(self.done),
            delay_node=np.array(self.arrive),
            begins=np.array([not graph.predecessors[node] for node in self.arrive]),
            recorded_seconds=max(ends) - min(record.start for record in self.records),
        )

    def node(self, record: Record, stream: str, ended: float) -> int:
        self.nodes.append(Operation(record.kind, record.kind, record.rank, stream, 0.0))
        self.ended.append(ended)
        self.waits.append([])
        return len(self.nodes) - 1

    def issue(self, blocking: set[int]) -> None:
        """A transfer is issued after the last thing that ended on its rank and that the rank waits for."""
        by_rank: dict[int, list[int]] = {}
        for number, record in enumerate(self.records):
            if record.kind in (*COMPUTE_KINDS, *BEFORE_FORWARD) or number in blocking:
                by_rank.setdefault(record.rank, []).append(number)
        for numbers in by_rank.values():
            numbers.sort(key=lambda number: self.records[number].end)
        ends = {rank: [self.records[number].end for number in numbers] for rank, numbers in by_rank.items()}
        freed: dict[tuple[int, str | None, str], float] = {}  # when the stream of transfers was free again
        for number, record in enumerate(self.records):
            computes = record.kind in COMPUTE_KINDS
            if not computes and record.kind not in COLLECTIVE_KINDS:
                stream = (record.rank, record.stream, record.kind)
                explained = record.start - freed.get(stream, -np.inf) <= TOLERANCE
                freed[stream] = record.end
                if explained:  # it stood in line behind the one before; what else had ended by then is chance
                    continue
            if record.rank in by_rank and (blocking or not computes):
                numbers = by_rank[record.rank]
                place = bisect_right(ends[record.rank], record.start + TOLERANCE) - 1
                place -= place >= 0 and numbers[place] == number  # of no length itself
                if place >= 0 and (not computes or numbers[place] in blocking):
                    self.waits[self.arrive[number]].append(self.done[numbers[place]])

    def connect_stages(self) -> None:
        computed: dict[tuple, int] = {}
        sent: dict[tuple, int] = {}
        received: dict[tuple, int] = {}
        for number, record in enumerate(self.records):
            if record.kind not in ("forward", "backward", *SEND_KINDS, *RECEIVE_KINDS):
                continue
            virtual = (record.chunk or 0) * self.stages + (record.stage or 0)
            towards = "forward" if record.kind.endswith("forward") else "backward"
            place = (towards, record.step, record.micro_batch, record.dp, record.tp, virtual)
            if record.kind in RECEIVE_KINDS:  # known by where it comes from
                place = (*place[:-1], virtual + (-1 if towards == "forward" else 1))
            table = sent if record.kind in SEND_KINDS else received if record.kind in RECEIVE_KINDS else computed
            if place in table:
                problem = (
                    f"the {record.kind} of micro-batch {record.micro_batch}, chunk {record.chunk} is recorded twice"
                )
                remedy = "Say micro_batch and chunk (and dp and tp, where ranks of a stage differ), or leave one out."
                raise UserError(f"step {record.step}, rank {record.rank}", problem, remedy)
            table[place] = number
        for place in sent.keys() | received.keys() | computed.keys():
            source, send, receive = computed.get(place), sent.get(place), received.get(place)
            target = computed.get((*place[:-1], place[-1] + (1 if place[0] == "forward" else -1)))
            if send is not None and source is not None:
                self.waits[self.arrive[send]].append(self.done[source])
            if send is not None and receive is not None:
                self.meet([send, receive])
            elif receive is not None and source is not None:  # the sender's side was not recorded
                latest = max(self.records[receive].start, self.records[source].end)
                self.work[receive] = max(0.0, self.records[receive].end - latest)
                self.waits[self.done[receive]].append(self.done[source])
            ranks = {self.records[end].rank for end in (source, target, send, receive) if end is not None}
            for end in (send, receive):
                if end is not None:
                    self.link[end] = tuple(sorted(ranks))
            last = next((end for end in (receive, send, source) if end is not None), None)
            if target is not None and last is not None and self.records[last].rank is not None:
                self.waits[self.done[target]].append(self.done[last])

    def connect_collectives(self) -> None:
        groups: dict[tuple, list[int]] = {}
        times: dict[tuple, int] = {}
        for number, record in enumerate(self.records):
            if record.kind in COLLECTIVE_KINDS:
                group = record.group or "dp"
                members = {
                    "dp": ("dp", record.stage, record.tp),
                    "tp": ("tp", record.stage, record.dp),
                    "all": ("all",),
                    "embedding": ("embedding", record.dp, record.tp),
                }[group]
                key = (record.step, record.kind, members, record.micro_batch, record.chunk)
                turn = times[record.rank, key] = times.get((record.rank, key), -1) + 1
                groups.setdefault((*key, turn), []).append(number)
        for numbers in groups.values():
            self.meet(numbers)
            for number in numbers:
                self.link[number] = tuple(sorted(self.records[one].rank for one in numbers))
        for user, collectives in self.first_users().items():
            self.waits[self.done[user]] += [self.done[collective] for collective in collectives]

    def first_users(self) -> dict[int, list[int]]:
        """For computations the collectives whose result they are the first to need."""
        found: dict[int, list[int]] = {}
        by_rank: dict[int, list[int]] = {}
        for number, record in enumerate(self.records):
            if record.kind in COMPUTE_KINDS:
                by_rank.setdefault(record.rank, []).append(number)
        starts = {rank: [self.records[number].start for number in numbers] for rank, numbers in by_rank.items()}
        for number, record in enumerate(self.records):
            if record.kind not in COLLECTIVE_KINDS or record.rank not in by_rank:
                continue
            first = bisect_right(starts[record.rank], record.end - TOLERANCE)
            for user in by_rank[record.rank][first:]:
                if self.needs(self.records[user], record):
                    found.setdefault(user, []).append(number)
                    break
        return found

    @staticmethod
    def needs(user: Record, collective: Record) -> bool:
        if collective.group == "tp" or collective.kind == "all_to_all":
            return True
        if collective.kind in BEFORE_FORWARD:
            return user.kind == "forward"
        # Gradients: the optimizer needs them or, where none was recorded, the next step.
        return user.kind == "optimizer" or user.step > collective.step

    def meet(self, numbers: list[int]) -> None:
        """Peers of one transfer: it begins when the last has arrived."""
        latest = max(self.records[number].start for number in numbers)
        self.nodes.append(Operation("meet", "meet", -1, f"meet {len(self.nodes)}", 0.0))
        self.ended.append(latest)
        self.waits.append([self.arrive[number] for number in numbers])
        for number in numbers:
            self.work[number] = max(0.0, self.records[number].end - latest)
            self.waits[self.done[number]].append(len(self.nodes) - 1)

    def delays(self, graph: Graph) -> np.ndarray:
        begin = min(record.start for record in self.records)
        delay = np.zeros(len(self.records))
        for number, record in enumerate(self.records):
            ready = max((self.ended[wait] for wait in graph.predecessors[self.arrive[number]]), default=begin)
            delay[number] = max(0.0, record.start - ready)
        return delay


def _placed(trace: Trace) -> list[Record]:
    """Records with stage, dp, tp, micro-batch and chunk filled in where the recorder left them out."""
    stages: dict[int, int] = {}
    for record in trace.records:
        if record.stage is not None and stages.setdefault(record.rank, record.stage) != record.stage:
            problem = f"is recorded with stage {stages[record.rank]} and stage {record.stage}"
            raise UserError(f"rank {record.rank}", problem, "A rank is one stage; its model chunks are 'chunk'.")
    unplaced = [rank for rank in trace.ranks if rank not in stages]
    if stages and unplaced:
        raise UserError(
            f"rank {unplaced[0]}", "has no stage, and other ranks have one", "Record the stage of every rank."
        )
    stages = stages or dict.fromkeys(trace.ranks, 0)
    told: dict[int, tuple[int | None, int | None]] = {}
    for record in trace.records:
        dp, tp = told.get(record.rank, (None, None))
        told[record.rank] = (record.dp if dp is None else dp, record.tp if tp is None else tp)
    place: dict[int, tuple[int, int]] = {}
    seen: dict[int, int] = {}
    for rank in trace.ranks:
        turn = seen[stages[rank]] = seen.get(stages[rank], -1) + 1
        dp, tp = told[rank]
        place[rank] = (turn if dp is None and tp is None else dp or 0, tp or 0)
    placed = []
    counts: dict[tuple, int] = {}
    for record in trace.records:
        dp, tp = place[record.rank]
        chunk, micro_batch = record.chunk or 0, record.micro_batch
        if micro_batch is None and record.kind not in ("optimizer", "data", *COLLECTIVE_KINDS):
            key = (record.step, record.rank, record.kind, chunk)
            micro_batch = counts[key] = counts.get(key, -1) + 1
        placed.append(record._replace(stage=stages[record.rank], dp=dp, tp=tp, chunk=chunk, micro_batch=micro_batch))
    return placed


def _without_unrecorded_time(records: list[Record]) -> list[Record]:
    """Steps that were not recorded leave no hole: the next recorded one begins where the last one ended."""
    steps = sorted({record.step for record in records})
    start = {step: min(record.start for record in records if record.step == step) for step in steps}
    end = {step: max(record.end for record in records if record.step == step) for step in steps}
    shift, shifts = 0.0, {steps[0]: 0.0}
    for one, following in pairwise(steps):
        if following != one + 1:
            shift += start[following] - end[one]
        shifts[following] = shift
    if not any(shifts.values()):
        return records
    return [
        record._replace(start=record.start - shifts[record.step], end=record.end - shifts[record.step])
        for record in records
    ]


def _blocking(records: list[Record]) -> set[int]:
    """Transfers that hold up their rank's computation: on its stream, or, without one, never beside a computation."""
    main = {record.rank: record.stream for record in records if record.kind == "forward" and record.stream}
    computing: dict[int, tuple[list[float], list[float]]] = {}
    for record in records:
        if record.kind in COMPUTE_KINDS:
            starts, ends = computing.setdefault(record.rank, ([], []))
            starts.append(record.start)
            ends.append(record.end)
    beside = set()
    transfers = [number for number, record in enumerate(records) if record.kind not in COMPUTE_KINDS]
    for number in transfers:
        record = records[number]
        if record.stream is None and record.kind not in beside and record.rank in computing:
            starts, ends = computing[record.rank]
            place = bisect_right(starts, record.start) - 1
            slack = TOLERANCE + 0.01 * (record.end - record.start)
            over_last = place >= 0 and ends[place] > record.start + slack
            over_next = place + 1 < len(starts) and starts[place + 1] < record.end - slack
            if over_last or over_next:
                beside.add(record.kind)

    def blocks(record: Record) -> bool:
        return record.kind not in beside if record.stream is None else record.stream == main.get(record.rank)

    return {number for number in transfers if blocks(records[number])}
