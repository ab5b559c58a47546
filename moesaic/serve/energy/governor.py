"""Runs the frequency control beside an engine: measures its steps, and sets the clock the next one needs.

    engine = Engine(model, frequency=FrequencyOptions(Slo(ttft=0.5, tpot=0.04)))

Before every step `tick` looks at what the last one was and how long it took. Steps that began while a clock changed say
nothing of either clock. When the engine has nothing to do, a thread lowers the clock.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from moesaic.errors import UserError
from moesaic.serve.energy.control import FrequencyControl, Load, Queued, Slo
from moesaic.serve.energy.gpu_clocks import Clocks, GpuClocks
from moesaic.serve.energy.routing import headroom

if TYPE_CHECKING:
    from moesaic.serve.core.engine import Engine

logger = logging.getLogger("moesaic.serve")

TTFT_MS, TPOT_MS = 1000.0, 50.0  # where no SLO is said
SWITCH_SECONDS = 0.03  # until a clock that was asked for holds (measured: 8 to 26 ms)
DWELL_SECONDS = 0.1  # at a clock before a lower one; a higher one is set at once
TYPICAL_CONTEXT = 512  # tokens of a request, where there is none to tell
IDLE_SECONDS = 0.25  # between two looks whether the engine has anything to do


@dataclass(frozen=True)
class FrequencyOptions:
    slo: Slo
    fixed: float | None = None  # MHz: this clock all the time, instead of control
    margin: float = 0.1  # of the SLO that is kept in reserve

    @classmethod
    def parse(cls, frequency: str | None, ttft_ms: float | None, tpot_ms: float | None) -> FrequencyOptions | None:
        """As the command line says it: auto, or a clock in MHz; SLOs in milliseconds."""
        if frequency is None:
            if ttft_ms is not None or tpot_ms is not None:
                raise UserError("--slo-ttft-ms, --slo-tpot-ms", "nothing follows them", "Add --frequency auto.")
            return None
        slo = Slo((ttft_ms or TTFT_MS) / 1e3, (tpot_ms or TPOT_MS) / 1e3)
        if frequency == "auto":
            return cls(slo)
        try:
            clock = float(frequency)
        except ValueError:
            clock = -1.0
        if not 0 < clock < 1e5:
            raise UserError("--frequency", f'"{frequency}" is neither auto nor a clock in MHz')
        return cls(slo, fixed=clock)


@dataclass(frozen=True)
class _Tick:
    """What was there before a step."""

    time: float
    decode: Load
    prompt_tokens: int
    generated_tokens: int
    steps: int
    clock: float


class Governor:
    def __init__(self, engine: Engine, options: FrequencyOptions, clocks: Clocks) -> None:
        self.clocks, self.options = clocks, options
        levels = clocks.levels
        if options.fixed is not None:
            levels = (min(levels, key=lambda level: abs(level - (options.fixed or 0.0))),)
        self.control = FrequencyControl(levels, options.slo, engine.scheduler.max_requests, options.margin)
        self.clock = levels[-1]
        self.changed = engine.clock()
        self.clocks.set(self.clock)
        self._last: _Tick | None = None
        self._waited = 0.0  # seconds since running requests had their last token
        self._lock = threading.Lock()

    def tick(self, engine: Engine) -> None:
        now, decode = engine.clock(), decoding(engine)
        with self._lock:
            if self._last is not None:
                self._measure(self._last, engine, now)
            queue = waiting(engine, self.options.slo, now)
            self._set(self.control.step_clock(decode, queue), now)
            counts = engine.counts
            self._last = _Tick(
                now, decode, counts.prompt_tokens, counts.generated_tokens, counts.steps, self._settled(now)
            )

    def rest(self, engine: Engine) -> None:
        """If the engine has nothing to do: what follows is no step's time."""
        with self._lock:
            if not engine.working:
                self._last, self._waited = None, 0.0
                self._set(self.control.idle_clock(self.clock), engine.clock())

    def stats(self, engine: Engine) -> dict[str, Any]:
        """For `EngineStats`: its clock, and the room it has for requests like those it has."""
        load = decoding(engine)
        room = headroom(self.control, load, load.context // load.batch if load.batch else TYPICAL_CONTEXT)
        return {"clock_mhz": self.clock, "room_same_clock": room.same_clock, "room_in_time": room.in_time}

    def _settled(self, now: float) -> float:
        """The clock of a step that begins now; 0: two of them."""
        return self.clock if now - self.changed >= SWITCH_SECONDS else 0.0

    def _measure(self, last: _Tick, engine: Engine, now: float) -> None:
        counts, seconds = engine.counts, now - last.time
        prompt, made = counts.prompt_tokens - last.prompt_tokens, counts.generated_tokens - last.generated_tokens
        if last.clock and counts.steps == last.steps + 1:
            if prompt:
                self.control.observe("prefill", last.clock, Load(prompt, prompt // 2), seconds)
            elif last.decode.batch:
                self.control.observe("decode", last.clock, last.decode, seconds)
        if last.decode.batch:
            self._waited += seconds
            if made:
                per_token = self._waited * last.decode.batch / max(made, 1)
                self.control.observe_interval(per_token, last.decode, last.clock or self.clock)
                self._waited = 0.0

    def _set(self, clock: float, now: float) -> None:
        if clock == self.clock or (clock < self.clock and now - self.changed < DWELL_SECONDS):
            return
        if self.clocks.set(clock):
            self.clock, self.changed = clock, now

    def close(self) -> None:
        self.clocks.close()


def decoding(engine: Engine) -> Load:
    """Requests that have their first token, and the tokens of their contexts."""
    running = [one for one in list(engine.scheduler.requests.values()) if one.first_token is not None and one.pages]
    return Load(len(running), sum(len(request.tokens) for request in running))


def waiting(engine: Engine, slo: Slo, now: float) -> Sequence[Queued]:
    """Requests without a first token, the most urgent first."""
    found = [one for one in list(engine.scheduler.requests.values()) if one.first_token is None]
    queue = []
    for request in sorted(found, key=lambda one: one.urgency):
        due = request.arrived + slo.ttft
        if request.deadline is not None:
            due = min(due, request.deadline)
        queue.append(Queued(Load(request.pending, request.pending // 2), due - now))
    return queue


def governor_for(engine: Engine, options: FrequencyOptions | None) -> Governor | None:
    """None, said once in words, where clocks cannot be set."""
    if options is None:
        return None
    try:
        if engine.model.device.type != "cuda":
            raise UserError("--frequency", f"the model is on a {engine.model.device.type}, which sets its own clock")
        uuid = torch.cuda.get_device_properties(engine.model.device).uuid
        governor = Governor(engine, options, GpuClocks([f"GPU-{uuid}"]))
    except UserError as error:
        logger.warning("%s; clocks are left as they are", error)
        return None
    threading.Thread(target=_watch, args=(weakref.ref(engine), governor), name="clocks", daemon=True).start()
    return governor


def _watch(engine_of: weakref.ref[Engine], governor: Governor) -> None:
    pause = threading.Event()
    while (engine := engine_of()) is not None:
        governor.rest(engine)
        del engine
        pause.wait(IDLE_SECONDS)
    governor.close()
