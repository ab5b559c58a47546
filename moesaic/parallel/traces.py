"""What every rank did when, as Chrome traces: Perfetto shows them, `moesaic plan whatif` reads them.

    recorder = Recorder(rank, stage=0)
    with recorder.operation("forward", micro_batch=0):
        ...
    recorder.next_step()
    recorder.write(folder)                       # trace-rank00000.json
    merge(folder, ranks, folder / "trace.json")  # on one rank, when all have written

Clocks of ranks on one machine agree; those of several machines as well as their time service keeps them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from moesaic.atomic import write_json
from moesaic.errors import UserError
from moesaic.json_files import read_json

COMPUTE = ("forward", "backward", "weight_gradient", "optimizer", "data")


class Recorder:
    """Operations of one rank. On a GPU an operation ends when the device is done with it, so recording makes the host
    wait: trace some steps, not all."""

    def __init__(
        self,
        rank: int,
        *,
        stage: int | None = None,
        dp: int | None = None,
        tp: int | None = None,
        device: torch.device | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.rank, self.device, self.clock = rank, device, clock
        self.place = {name: value for name, value in (("stage", stage), ("dp", dp), ("tp", tp)) if value is not None}
        self.step = 0
        self.events: list[dict[str, Any]] = []

    @contextmanager
    def operation(
        self,
        kind: str,
        *,
        micro_batch: int | None = None,
        chunk: int | None = None,
        group: str | None = None,
        lengths: Sequence[int] = (),
    ) -> Iterator[None]:
        """`kind` as in plan/timeline/trace.py: forward, backward, optimizer, all_reduce, send_forward, ..."""
        start = self._now()
        yield
        end = self._now()
        given = {"micro_batch": micro_batch, "chunk": chunk, "group": group, "lengths": list(lengths) or None}
        args = {"step": self.step, **self.place} | {name: value for name, value in given.items() if value is not None}
        self.events.append(
            {
                "ph": "X",
                "name": kind if micro_batch is None else f"{kind} {micro_batch}",
                "cat": kind,
                "pid": self.rank,
                "tid": "compute" if kind in COMPUTE else "communication",
                "ts": start * 1e6,
                "dur": (end - start) * 1e6,
                "args": args,
            }
        )

    def next_step(self) -> None:
        self.step += 1

    def write(self, folder: Path) -> Path:
        file = folder / f"trace-rank{self.rank:05d}.json"
        write_json(file, {"traceEvents": self.events, "displayTimeUnit": "ms"})
        return file

    def _now(self) -> float:
        if self.device is not None and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return self.clock()


def merge(folder: Path, ranks: int, out: Path) -> None:
    """One trace of all ranks, from the first event on."""
    events: list[dict[str, Any]] = []
    for rank in range(ranks):
        file = folder / f"trace-rank{rank:05d}.json"
        if not file.is_file():
            raise UserError(
                file, "no such file", f"Every one of the {ranks} ranks writes its own before they are merged."
            )
        events += read_json(file)["traceEvents"]
    first = min((event["ts"] for event in events), default=0.0)
    names = [
        {"ph": "M", "name": "process_name", "pid": rank, "tid": "", "args": {"name": f"rank {rank}"}}
        for rank in range(ranks)
    ]
    shifted = [event | {"ts": event["ts"] - first} for event in events]
    write_json(out, {"traceEvents": names + shifted, "displayTimeUnit": "ms"})
