"""A traced run: what this rank did when (traces.py), what travelled (flows.py), and every few steps who was slow."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from moesaic.parallel.mesh import ParallelMesh
from moesaic.parallel.staying_up.flows import Flows
from moesaic.parallel.staying_up.stragglers import own_seconds, stragglers
from moesaic.parallel.traces import Recorder, merge

KEPT = 200  # steps of which a trace is kept: the last ones
TRACE = "trace.json"
FOLDER = "trace"  # each rank's own
KINDS = {"reduce": ("all_reduce", "dp")}  # operations that the planner knows by another name, with their group


class Timings:
    def __init__(self, mesh: ParallelMesh, out: Path, every: int) -> None:
        self.mesh, self.out, self.every = mesh, out, every
        place, layout = mesh.place, mesh.layout
        self.recorder = Recorder(
            mesh.rank, stage=place.pp, dp=place.dp * layout.cp + place.cp, tp=place.tp, device=mesh.device
        )
        self.flows = Flows(self.recorder._now, self._flow)
        self._told = 0  # events that the last report has seen
        self._since: float | None = None  # when it was made
        self._steps = 0

    def operation(self, name: str, step: int, **facts: Any) -> AbstractContextManager[None]:
        self.recorder.step = step
        kind, group = KINDS.get(name, (name, None))
        return self.recorder.operation(kind, group=group, **facts)

    def _flow(self, name: str, group: str, size: int, start: float, end: float) -> None:
        self.recorder.events.append(
            {
                "ph": "X", "name": f"flow {name} {group}", "cat": "flow", "pid": self.mesh.rank, "tid": "flows",
                "ts": start * 1e6, "dur": (end - start) * 1e6,
                "args": {"step": self.recorder.step, "collective": name, "among": group, "bytes": size},
            }
        )  # fmt: skip

    def after_step(self, note: Callable[..., None]) -> None:
        """Every `every` steps: who was slow, and what travelled."""
        self._steps += 1
        now = self.recorder.clock()
        self._since = now if self._since is None else self._since  # the first step is full of first times
        if self._steps % self.every:
            return
        events = self.recorder.events[self._told :]
        steps = len({event["args"]["step"] for event in events})
        said = self.mesh.collect({"own": own_seconds(events), "flows": _totals(events), "stage": self.mesh.place.pp})
        seconds = (now - self._since) / max(self.every - (self._steps == self.every), 1)
        slow = stragglers([one["own"] for one in said], [one["stage"] for one in said], steps, max(seconds, 1e-9))
        text = "; ".join(map(str, slow[:3])) or "no rank is slower than its peers by a fiftieth of a step"
        facts: dict[str, Any] = {"seconds": round(seconds, 6), "flows": said[0]["flows"], "steps": steps}
        facts |= {"ranks": [one.rank for one in slow], "operations": [one.operation for one in slow],
                  "cost": [round(one.seconds, 6) for one in slow]}  # fmt: skip
        note(f"{seconds * 1e3:.0f} ms a step; {text}", kind="stragglers", **facts)
        self._since = now
        last = self.recorder.step
        self.recorder.events = [event for event in self.recorder.events if event["args"]["step"] > last - KEPT]
        self._told = len(self.recorder.events)

    def write(self) -> None:
        """One trace of all ranks, in the run's directory. All ranks must ask."""
        folder = self.out / FOLDER
        folder.mkdir(exist_ok=True)
        self.recorder.write(folder)
        self.mesh.barrier()
        if self.mesh.is_main:
            merge(folder, self.mesh.ranks, self.out / TRACE)


def _totals(events: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Of each collective in each group: how many, how many bytes this rank put in, and how many seconds."""
    found: dict[str, dict[str, float]] = {}
    for event in events:
        if event["cat"] == "flow":
            total = found.setdefault(event["name"].removeprefix("flow "), {"count": 0, "bytes": 0, "seconds": 0.0})
            total["count"] += 1
            total["bytes"] += event["args"]["bytes"]
            total["seconds"] = round(total["seconds"] + event["dur"] / 1e6, 6)
    return found
