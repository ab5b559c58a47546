"""The report of a training run: metrics, events, progress line, plots, and the summary at its end.

    with Report(directory, steps=1000, start=position.step, state=saved_report) as report:
        for ...:
            lines = report.step(StepRecord(step, loss, lr, tokens, seconds, loads=counts_LE))
            report.note("saved", kind="save")
        report.close()

The values of a step may be tensors on a GPU. They are copied asynchronously and read up to `MAX_IN_FLIGHT` steps later,
so the report never makes the device idle; `state()` waits for them all, and belongs in every checkpoint.
"""

from __future__ import annotations

import math
import shlex
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import numpy as np
from rich.console import Console
from rich.live import Live
from torch import Tensor

from moesaic.phases import phase_shares, phase_totals
from moesaic.train.report.device_reads import DeviceRead
from moesaic.train.report.display import Progress, format_loss
from moesaic.train.report.expert_load import ExpertLoad, Loads, by_layer
from moesaic.train.report.metrics import EVENTS, Journal, Line, Metrics, read_metrics
from moesaic.train.report.tensorboard import TensorBoard
from moesaic.units import plural, readable_count, readable_duration

RECENT = 100  # steps whose mean a run's loss is, at most
MAX_IN_FLIGHT = 2  # steps queued on the device while the host goes on; with more, it waits for the oldest
Value = float | Tensor
Outcome = Literal["finished", "stopped", "failed"]


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step. Values may be 0-dimensional tensors on any device."""

    step: int  # the first is 1
    loss: Value
    lr: float
    tokens_in_step: int
    seconds: float
    grad_norm: Value | None = None
    skipped: Value = False  # the gradient was not finite, and the weights stayed as they were
    flops: float | None = None  # that the model needs for it, however they are computed
    parts: Mapping[str, Value] = field(default_factory=dict)  # written under their names: `loss/mtp`, `balance/z_loss`
    loads: Loads | None = None  # tokens of each expert: (L, E), or one list per mixture layer, or {layer: its list}


class Report:
    """Only one process of a run has one.

    `start` is the step the run resumes from: what was recorded after it is dropped; 0 is a new run, or,
    `again`, one that was cut off before its first checkpoint, whose events stay.
    """

    def __init__(
        self,
        directory: str | Path,
        steps: int,
        start: int = 0,
        *,
        state: Mapping[str, Any] | None = None,
        peak_flops: float | None = None,
        quiet: bool = False,
        again: bool = False,
        every: float = 10.0,
        full_every: int = 100,
        dead_after: int = 100,
        tensorboard: bool = True,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.directory, self.steps, self.quiet = Path(directory), steps, quiet
        self._peak_flops = peak_flops
        self._every, self._clock = every, clock
        self._console = console or Console(stderr=True, highlight=False)
        self._pending: deque[tuple[StepRecord, list[str], DeviceRead]] = deque()
        self._load = ExpertLoad(full_every, dead_after)
        self._closed = False

        self._metrics = Metrics(self.directory)
        self.dropped = len(self._metrics.resume(start))  # steps that will be taken again
        self._restore(state)
        self._step = start
        self._events = Journal(self.directory / EVENTS)
        if not start and not again:
            self._events.replace([])
        self._progress = Progress(steps, start)
        self._live: Live | None = None
        self._next_line = 0.0
        if not quiet and self._console.is_terminal:
            self._live = Live(self._progress, console=self._console, refresh_per_second=4, transient=True)
            self._live.start()
        if start:
            self.note(f"resumed after step {start:,}", kind="resume")
        self._tensorboard: TensorBoard | None = None
        if tensorboard:
            try:
                self._tensorboard = TensorBoard(self.directory, start)
            except ImportError:
                self.note("no TensorBoard files: tensorboardX is not installed", kind="tensorboard")
            except OSError as error:
                self._without_tensorboard(error)

    def __enter__(self) -> Report:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is None:
            self.close()
        elif issubclass(kind, KeyboardInterrupt):
            self.close("stopped")
        else:
            with suppress(Exception):  # what went wrong is to be reported, not what could not be written then
                self.close("failed")

    def step(self, record: StepRecord) -> list[Line]:
        """Record a step. Returns the lines of the steps whose values have arrived, often an earlier one's."""
        names, tensors = _tensors(record)
        self._pending.append((record, names, DeviceRead(tensors)))
        return self._take(lambda read: len(self._pending) > MAX_IN_FLIGHT or read.ready())

    def flush(self) -> list[Line]:
        """Wait for all values in flight, and write all lines to disk."""
        lines = self._take(lambda read: True)
        self._metrics.sync()
        return lines

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold for `Report(state=...)` to resume exactly; plain values."""
        self.flush()
        return {"tokens": self._tokens, "experts": self._load.state()}

    @property
    def loss(self) -> float | None:
        """Mean loss of the last steps; after `state()`, of all of them."""
        return recent_mean(list(self._losses), self._step)

    def note(self, text: str, kind: str = "note", **facts: Any) -> None:
        """An event: a spike, a save, a resume. Printed, and kept in events.jsonl with the step."""
        step = self._pending[-1][0].step if self._pending else self._step
        when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self._print(f"step {step:,}: {text}" if step else text)
        self._events.append({"kind": kind, "step": step, "when": when, "text": text, **facts})

    def rewind(self, to: int, state: Mapping[str, Any] | None = None, why: str = "") -> None:
        """The run is rewound to the state after step `to`: what came after is no longer part of it.

        `state` is what `state()` returned then. The losses that are dropped stay in the event, for a look
        at what happened.
        """
        self.flush()
        assert to <= self._step, f"cannot rewind to step {to} from step {self._step}"
        dropped = [line for line in read_metrics(self.directory) if line["step"] > to]
        self.note(  # before they are dropped: a run that is killed here still knows why
            f"{why + '; ' if why else ''}rewound to step {to:,}",
            kind="rewind",
            to=to,
            why=why,
            steps=[line["step"] for line in dropped],
            loss=[line.get("loss") for line in dropped],
        )
        self._metrics.resume(to)
        self._restore(state)
        self._step = to
        self._progress.rewind(to)
        self._to_tensorboard(lambda tensorboard: tensorboard.resume(to))

    def close(self, outcome: Outcome = "finished", plot: bool = True) -> dict[str, Any]:
        """Close the report: write what is left, plot the curves, print the summary and what to do next.

        Returns the summary, which is what a command prints with `--json`.
        """
        if self._closed:
            return {}
        self._closed = True
        try:
            self.flush()
        finally:
            if self._live:
                self._live.stop()
            self._metrics.close()
            self._to_tensorboard(lambda tensorboard: tensorboard.close())
        summary = summarize(self.directory, self.steps, outcome)
        if plot and summary["step"]:
            plot_file = self._plot()
            summary["picture"] = str(plot_file) if plot_file else None
        self._events.close()
        if outcome != "failed" and not self.quiet:
            print("\n".join(final_summary(summary)), flush=True)
        return summary

    def _restore(self, state: Mapping[str, Any] | None) -> None:
        """Continue from a checkpoint's state; without one, from the last line that is left."""
        self._tokens = int((self._metrics.last() or {}).get("tokens", 0))
        lines = read_metrics(self.directory)
        self._losses = deque((line["loss"] for line in lines if line.get("loss") is not None), maxlen=RECENT)
        if state is not None:
            self._tokens = int(state["tokens"])
            self._load.load_state(state["experts"])

    def _plot(self) -> Path | None:
        from moesaic.train.report.plot import plot_run

        try:
            return plot_run(self.directory)
        except Exception as error:  # whatever fails in plotting, the run has succeeded
            self.note(f"could not plot the curves: {error}", kind="plot")
            return None

    def _take(self, wanted: Callable[[DeviceRead], bool]) -> list[Line]:
        lines = []
        while self._pending and wanted(self._pending[0][2]):
            record, names, read = self._pending.popleft()
            line = self._line(record, dict(zip(names, read.numbers())))
            self._metrics.write(line)
            if math.isfinite(line["loss"]):
                self._losses.append(line["loss"])
            self._to_tensorboard(lambda tensorboard: tensorboard.write(line))  # noqa: B023 (called at once)
            self._progress.update(line)
            self._show()
            lines.append(line)
        return lines

    def _to_tensorboard(self, show: Callable[[TensorBoard], None]) -> None:
        if self._tensorboard is None:
            return
        try:
            show(self._tensorboard)
        except OSError as error:  # a second copy of the curves must not fail a run
            self._tensorboard = None
            self._without_tensorboard(error)

    def _without_tensorboard(self, error: OSError) -> None:
        with suppress(OSError):  # a full disk may not take this either; it is printed then
            why = error.strerror or error
            self.note(f"no TensorBoard files from here on ({why})", kind="tensorboard")

    def _line(self, record: StepRecord, values: Mapping[str, Any]) -> Line:
        def value(name: str, given: Value) -> float:
            return float(values[name][0]) if isinstance(given, Tensor) else float(given)

        self._step = record.step
        self._tokens += record.tokens_in_step
        throughput = record.tokens_in_step / max(record.seconds, 1e-9)
        line: Line = {
            "step": record.step,
            "loss": value("loss", record.loss),
            "lr": float(record.lr),
            "tokens": self._tokens,
            "tokens_per_second": round(throughput, 1),
            "seconds": round(record.seconds, 6),
        }
        if record.flops and self._peak_flops:
            line["mfu"] = round(record.flops / max(record.seconds, 1e-9) / self._peak_flops, 6)
        if record.grad_norm is not None:
            line["grad_norm"] = value("grad_norm", record.grad_norm)
        line["skipped"] = bool(value("skipped", record.skipped))
        for name, part in record.parts.items():
            assert name not in line, f"{name} is not the name of a part: every line has it"
            line[name] = value(f"parts/{name}", part)
        if record.loads is not None and len(record.loads):
            counts = {
                layer: np.asarray(values.get(f"loads/{layer}", given)).astype(np.int64)
                for layer, given in by_layer(record.loads).items()
            }
            line |= self._load.update(record.step, counts, last=record.step == self.steps)
        return line

    def _show(self) -> None:
        if self.quiet or self._live:
            return
        now = self._clock()
        if now >= self._next_line or self._step == self.steps:
            self._next_line = now + self._every
            print(self._progress.plain(), file=self._console.file, flush=True)

    def _print(self, text: str) -> None:
        if self.quiet:
            return
        if self._live:
            self._console.print(text, markup=False, soft_wrap=True)
        else:
            print(text, file=self._console.file, flush=True)


def _tensors(record: StepRecord) -> tuple[list[str], list[Tensor]]:
    """The tensors of a record, which have to be copied from the device, with their names."""
    named: dict[str, Any] = {"loss": record.loss, "grad_norm": record.grad_norm, "skipped": record.skipped}
    named |= {f"parts/{name}": value for name, value in record.parts.items()}
    if record.loads is not None:
        named |= {f"loads/{layer}": counts for layer, counts in by_layer(record.loads).items()}
    tensors = {name: value for name, value in named.items() if isinstance(value, Tensor)}
    return list(tensors), list(tensors.values())


def summarize(directory: Path, steps: int, outcome: Outcome) -> dict[str, Any]:
    """A run in a few numbers, from its metrics."""
    lines = read_metrics(directory)
    losses = [line["loss"] for line in lines if line.get("loss") is not None]
    seconds = sum(line.get("seconds", 0.0) for line in lines)
    tokens = lines[-1]["tokens"] if lines else 0
    step = lines[-1]["step"] if lines else 0
    return {
        "directory": str(directory),
        "outcome": outcome,
        "step": step,
        "steps": steps,
        "tokens": tokens,
        "seconds": round(seconds, 3),
        "tokens_per_second": round(tokens / seconds, 1) if seconds else None,
        "first_loss": losses[0] if losses else None,
        "last_loss": losses[-1] if losses else None,
        "loss": recent_mean(losses, step),
        "skipped": sum(bool(line.get("skipped")) for line in lines),
        "dead_experts": lines[-1].get("balance/dead") if lines else None,
        "phases": phase_totals(lines),
        "metrics": str(directory / "metrics.jsonl"),
        "picture": None,
    }


def recent_mean(losses: Sequence[float], steps: int) -> float | None:
    """The mean over the last 5 % of a run: a single step's loss is noise."""
    last = losses[-max(1, min(RECENT, steps // 20)) :]
    return math.fsum(last) / len(last) if last else None


def final_summary(summary: Mapping[str, Any]) -> list[str]:
    """The end of a run's output: what was trained, and what to do next."""
    place, step = summary["directory"], summary["step"]
    if summary["outcome"] == "finished":
        text = f"{place}: trained {plural(step, 'step')}"
    else:
        text = f"{place}: stopped after {step:,} of {plural(summary['steps'], 'step')}"
    text += f", {readable_count(summary['tokens'])} tokens in {readable_duration(summary['seconds'])}"
    if summary["loss"] is not None:
        text += f", loss {format_loss(summary['first_loss'])} to {format_loss(summary['loss'])}"
    lines = [text + "."]
    if summary["phases"]:
        lines.append(f"Time: {phase_shares(summary['phases'])}.")
    if summary["skipped"]:
        lines.append(f"Steps skipped because the gradient was not finite: {summary['skipped']:,}.")
    if summary["dead_experts"]:
        lines.append(f"Dead experts (no tokens): {summary['dead_experts']:,}; a higher balance.bias_rate may help.")
    if summary["picture"]:
        lines.append(f"Plots: {summary['picture']}")
    if summary["outcome"] == "stopped":
        return [*lines, "Resume: run the same command again"]
    return [*lines, f"Inspect it: moesaic show {shlex.quote(place)}"]
