"""A recorded trace of a training run: which rank did what when, over several steps; as a Chrome trace or as CSV.

Chrome traces (chrome://tracing, Perfetto; `.json` or `.json.gz`): complete events with `pid` = rank, `tid` = stream,
`cat` = kind, `ts` and `dur` in microseconds, and `args` with `step`, `stage`, `micro_batch`, `chunk`, `dp`, `tp`,
`group`, `lengths` as far as they are known. Events of other kinds (kernels, annotations) are left aside.

CSV: a header `step,rank,stage,kind,micro_batch,chunk,start,end`, in any order, times in seconds; `stream`, `dp`, `tp`,
`group` and `lengths` (numbers with blanks between them) may stand beside them. What does not apply is left empty.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

from moesaic.errors import UserError
from moesaic.plan.timeline.events import Timeline

COMPUTE_KINDS = ("forward", "backward", "weight_gradient", "optimizer", "data")
SEND_KINDS = ("send_forward", "send_backward")
RECEIVE_KINDS = ("recv_forward", "recv_backward")
COLLECTIVE_KINDS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "barrier")
KINDS = COMPUTE_KINDS + SEND_KINDS + RECEIVE_KINDS + COLLECTIVE_KINDS
GROUPS = ("dp", "tp", "all", "embedding")
REQUIRED = ("rank", "kind", "start", "end")
CSV_COLUMNS = ("step", "rank", "stage", "kind", "micro_batch", "chunk", "start", "end")
CSV_OPTIONAL = ("stream", "dp", "tp", "group", "lengths")
_OTHER_NAMES = {
    "fwd": "forward",
    "bwd": "backward",
    "forward_compute": "forward",
    "backward_compute": "backward",
    "forward_send": "send_forward",
    "forward_recv": "recv_forward",
    "backward_send": "send_backward",
    "backward_recv": "recv_backward",
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "params_sync": "all_gather",
    "grads_sync": "reduce_scatter",
    "optimizer_step": "optimizer",
}


class Record(NamedTuple):
    """One operation as it was recorded, in seconds. None is what the recorder did not say."""

    rank: int
    kind: str
    start: float
    end: float
    step: int = 0
    stage: int | None = None
    micro_batch: int | None = None
    chunk: int | None = None
    stream: str | None = None
    dp: int | None = None
    tp: int | None = None
    group: str | None = None
    lengths: tuple[int, ...] = ()


@dataclass(frozen=True)
class Trace:
    """The operations of some steps on some ranks, in order of their starts on each rank."""

    records: tuple[Record, ...]

    @staticmethod
    def of(records: Iterable[Record]) -> Trace:
        return Trace(tuple(sorted(records, key=lambda record: (record.rank, record.start, record.end))))

    @staticmethod
    def of_timeline(timeline: Timeline) -> Trace:
        """What a simulation did, as if it had been recorded; operations of kinds unknown to traces are left out."""
        return Trace.of(
            Record(
                operation.rank,
                operation.kind,
                float(start),
                float(end),
                operation.step or 0,
                operation.stage,
                operation.micro_batch,
                operation.chunk,
                operation.stream,
            )
            for operation, start, end in zip(timeline.operations, timeline.starts, timeline.ends)
            if operation.kind in KINDS
        )

    @property
    def steps(self) -> list[int]:
        return sorted({record.step for record in self.records})

    @property
    def ranks(self) -> list[int]:
        return sorted({record.rank for record in self.records})


def read_trace(file: str | Path) -> Trace:
    """A trace from a `.csv`, `.json` or `.json.gz` file; a UserError says what is wrong with it, and where."""
    path = Path(file)
    try:
        raw = path.read_bytes()
        raw = gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
        text = raw.decode("utf-8-sig")
    except FileNotFoundError:
        raise UserError(path, "no such file", "Name a trace: a CSV or a Chrome trace in JSON.") from None
    except UnicodeDecodeError:
        raise UserError(path, "is not UTF-8 text", "A trace is a CSV or a Chrome trace in JSON.") from None
    except (OSError, EOFError) as error:
        raise UserError(path, f"cannot be read ({error})", "Is the file whole, and readable?") from None
    records = _from_chrome(path, text) if text.lstrip()[:1] in ("{", "[") else _from_csv(path, text)
    if not records:
        remedy = f"Every operation needs a rank, a start, an end and one of these kinds: {', '.join(KINDS)}."
        raise UserError(path, "holds no operation of a training step", remedy)
    return Trace.of(records)


def chrome_trace(trace: Trace) -> dict[str, Any]:
    """The trace as an object that chrome://tracing and Perfetto open."""
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": rank, "tid": "", "args": {"name": f"rank {rank}"}}
        for rank in trace.ranks
    ]
    for record in trace.records:
        fields = ("step", "stage", "micro_batch", "chunk", "dp", "tp", "group")
        args = {field: getattr(record, field) for field in fields if getattr(record, field) is not None}
        if record.lengths:
            args["lengths"] = list(record.lengths)
        label = record.kind if record.micro_batch is None else f"{record.kind} {record.micro_batch}"
        events.append(
            {
                "ph": "X",
                "name": label,
                "cat": record.kind,
                "pid": record.rank,
                "tid": record.stream or "",
                "ts": record.start * 1e6,
                "dur": (record.end - record.start) * 1e6,
                "args": args,
            }
        )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write_chrome(trace: Trace, file: str | Path) -> None:
    Path(file).write_text(json.dumps(chrome_trace(trace)))


def write_csv(trace: Trace, file: str | Path) -> None:
    optional = [
        name for name in CSV_OPTIONAL if any(getattr(record, name) not in (None, ()) for record in trace.records)
    ]
    with open(file, "w", newline="", encoding="utf-8") as out:
        writer = csv.writer(out)
        writer.writerow([*CSV_COLUMNS, *optional])
        for record in trace.records:
            values = [getattr(record, name) for name in (*CSV_COLUMNS, *optional)]
            writer.writerow([" ".join(map(str, value)) if isinstance(value, tuple) else value for value in values])


def _from_csv(path: Path, text: str) -> list[Record]:
    rows = csv.reader(io.StringIO(text))
    header = [name.strip().lower() for name in next(rows, [])]
    known = CSV_COLUMNS + CSV_OPTIONAL
    for name in header:
        if name not in known:
            near = get_close_matches(name, known, 1)
            hint = f"Did you mean {near[0]!r}?" if near else f"The first line is {','.join(CSV_COLUMNS)}."
            raise UserError(f"{path}, line 1", f"unknown column {name!r}", hint)
    missing = [name for name in REQUIRED if name not in header]
    if missing:
        problem = f"has no column {' and '.join(map(repr, missing))}"
        raise UserError(f"{path}, line 1", problem, f"The first line is {','.join(CSV_COLUMNS)}.")
    records = []
    try:
        for row in rows:
            if not any(cell.strip() for cell in row):
                continue
            place = f"{path}, line {rows.line_num}"
            if len(row) != len(header):
                raise UserError(place, f"has {len(row)} cells for {len(header)} columns", "Mend or leave out the line.")
            records.append(_record(place, dict(zip(header, map(str.strip, row)))))
    except csv.Error as error:
        raise UserError(f"{path}, line {rows.line_num}", f"is not CSV ({error})", "Write the file again.") from None
    return records


def _from_chrome(path: Path, text: str) -> list[Record]:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        remedy = "Was the run cut off while it wrote? A Chrome trace is one JSON value."
        raise UserError(path, f"is not JSON ({error})", remedy) from None
    events = content.get("traceEvents") if isinstance(content, dict) else content
    if not isinstance(events, list):
        raise UserError(path, "has no list 'traceEvents'", "It is not a Chrome trace. Was another file meant?")
    records = []
    opened: dict[tuple[Any, Any], list[tuple[int, dict[str, Any]]]] = {}
    for number, event in enumerate(events):
        place = f"{path}, event {number}"
        if not isinstance(event, dict):
            raise UserError(place, "is not an object", "Every event of a Chrome trace is one.")
        phase = event.get("ph")
        if phase in ("B", "E"):  # a pair around each operation
            stack = opened.setdefault((str(event.get("pid")), str(event.get("tid"))), [])
            if phase == "B":
                stack.append((number, event))
                continue
            if not stack:
                raise UserError(place, "ends what did not begin", "Every 'E' event needs a 'B' before it.")
            begun = stack.pop()[1]
            begin, end = (_number(place, "ts", one.get("ts")) for one in (begun, event))
            merged = {**event.get("args", {}), **begun.get("args", {})}
            event = {**begun, "ts": begin, "dur": end - begin, "args": merged}
        elif phase != "X":
            continue
        if record := _of_event(place, event):
            records.append(record)
    left = [stack[0] for stack in opened.values() if stack]
    if left:
        number, event = left[0]
        problem = f"{event.get('name')!r} begins and never ends"
        raise UserError(f"{path}, event {number}", problem, "Was the run cut off while it wrote?")
    return records


def _of_event(place: str, event: dict[str, Any]) -> Record | None:
    args = event.get("args") or {}
    if not isinstance(args, dict):
        raise UserError(place, "'args' is not an object", "It holds step, stage, micro_batch and so on.")
    kinds = (args.get("kind"), event.get("cat"), str(event.get("name", "")).partition(" ")[0])
    kind = next((_kind(kind) for kind in kinds if isinstance(kind, str) and _kind(kind) in KINDS), None)
    if kind is None:
        return None
    start, seconds = (_number(place, name, event.get(name)) / 1e6 for name in ("ts", "dur"))
    row = {name: args[name] for name in (*CSV_COLUMNS, *CSV_OPTIONAL) if name in args}
    stream = event.get("tid")
    row |= {"rank": args.get("rank", event.get("pid")), "kind": kind, "start": start, "end": start + seconds}
    return _record(place, row)._replace(stream=None if stream in (None, "") else str(stream))


def _record(place: str, row: dict[str, Any]) -> Record:
    kind = _kind(str(row["kind"]))
    if kind not in KINDS:
        near = get_close_matches(kind, KINDS, 1)
        hint = f"Did you mean {near[0]!r}?" if near else f"Known are: {', '.join(KINDS)}."
        raise UserError(place, f"unknown kind {row['kind']!r}", hint)
    start, end = (_number(place, name, row[name]) for name in ("start", "end"))
    if end < start:
        raise UserError(place, f"ends at {end}, before it starts at {start}", "Are 'start' and 'end' exchanged?")
    rank = _whole(place, "rank", row["rank"])
    if rank is None:
        raise UserError(place, "has no rank", "Every operation ran on one.")
    group = str(row.get("group") or "") or None
    if group not in (None, *GROUPS):
        raise UserError(place, f"unknown group {group!r}", f"Known are: {', '.join(GROUPS)}.")
    lengths = row.get("lengths") or ()
    parts = lengths.split() if isinstance(lengths, str) else lengths
    if not isinstance(parts, list | tuple):
        raise UserError(place, "'lengths' is not a list", "It holds the sequence lengths of the micro-batch.")
    return Record(
        rank,
        kind,
        start,
        end,
        _whole(place, "step", row.get("step")) or 0,
        _whole(place, "stage", row.get("stage")),
        _whole(place, "micro_batch", row.get("micro_batch")),
        _whole(place, "chunk", row.get("chunk")),
        stream=str(row.get("stream") or "") or None,
        dp=_whole(place, "dp", row.get("dp")),
        tp=_whole(place, "tp", row.get("tp")),
        group=group,
        lengths=tuple(length for part in parts if (length := _whole(place, "lengths", part)) is not None),
    )


def _kind(name: str) -> str:
    plain = name.strip().lower().replace("-", "_").replace(" ", "_")
    return _OTHER_NAMES.get(plain, plain)


def _number(place: str, name: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number) or isinstance(value, bool):
        raise UserError(
            place, f"{name!r} is {value!r}", "It must be a number of seconds (in a Chrome trace microseconds)."
        )
    return number


def _whole(place: str, name: str, value: Any) -> int | None:
    """None for what is left out; recorders write that as nothing or -1."""
    if value is None or value == "":
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number) or number != int(number) or isinstance(value, bool) or number < -1:
        raise UserError(place, f"{name!r} is {value!r}", "It must be a whole number, or left out.")
    return None if number == -1 else int(number)
