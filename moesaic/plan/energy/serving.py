"""Serve a trace with prefill and decode on separate instances, and count every joule: steps, pauses, clock changes.

    fleet = Fleet(serving, prefill=2, decode=2)
    outcome = serve_trace(trace, fleet, Slo(ttft=0.5, tpot=0.04), "voltana")

Policies: `live` (what `moesaic serve --frequency auto` runs: it has nothing but measurements), `voltana` (control.py:
control and router, with profiles), `control` (the same with round-robin routing), or a clock in MHz held all the time.
A step's duration scatters by `scatter`; the same seed gives the same run.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from moesaic.errors import UserError
from moesaic.plan.energy.clocks import ClockModel, Draw
from moesaic.plan.energy.control import Control, VoltanaControl
from moesaic.plan.energy.control import route as route_by_power
from moesaic.plan.energy.policies import LiveControl, control_for
from moesaic.plan.energy.request_trace import Request
from moesaic.plan.energy.step import Pricing
from moesaic.plan.serving.memory import sequence_bytes, sequences_that_fit
from moesaic.plan.serving.step import Serving
from moesaic.serve.energy.control import Load, Phase, Queued, Slo
from moesaic.serve.energy.routing import route

SWITCH = 0.015  # seconds until a clock that was asked for holds (measured: 8 to 26 ms)
TYPICAL_CONTEXT = 2048  # tokens of a sequence, when asking how many fit


@dataclass(frozen=True)
class Fleet:
    """Instances of one deployment; each is `serving.layout.devices` devices."""

    serving: Serving
    prefill: int = 2
    decode: int = 2
    prefill_tokens: int = 8192  # of one prefill step, unless one prompt has more
    running: int = 512  # sequences that an instance decodes at once at most

    @property
    def devices(self) -> int:
        return self.serving.layout.devices


@dataclass(frozen=True)
class Outcome:
    """`attainment`: share of all requests that met both SLOs."""

    policy: str
    requests: int
    tokens: int
    seconds: float
    joules: float
    prefill_joules: float
    decode_joules: float
    idle_joules: float  # of both, while nothing ran
    attainment: float
    ttft_attainment: float
    tpot_attainment: float
    ttft_p99: float
    tpot_p99: float
    prefill_clock: float  # mean over the time that steps ran
    decode_clock: float
    batch: float  # mean decode batch over the time that steps ran
    clock_changes: int

    @property
    def joules_per_token(self) -> float:
        return self.joules / max(1, self.tokens)


@dataclass
class _Instance:
    """A clock that follows what is asked of it a little later, and a meter."""

    model: ClockModel
    control: Control
    devices: int
    clock: float
    pending: tuple[float, float] | None = None  # when it will hold, and which
    since: float = 0.0  # until when the meter has counted
    busy: float = 0.0
    busy_joules: float = 0.0
    idle_joules: float = 0.0
    clock_seconds: float = 0.0
    changes: int = 0

    def ask(self, now: float, clock: float) -> None:
        """One change is under way at a time; a newer wish takes the place of the one that waits."""
        if clock != (self.pending[1] if self.pending else self.clock):
            self.pending = (self.pending[0] if self.pending else now + SWITCH, clock)
            self.changes += 1

    def _spans(self, now: float) -> list[tuple[float, float]]:
        """From the last count until now: seconds, and the clock that held."""
        spans = []
        if self.pending and self.pending[0] <= now:
            at = max(self.since, self.pending[0])
            spans.append((at - self.since, self.clock))
            self.since, self.clock, self.pending = at, self.pending[1], None
        spans.append((now - self.since, self.clock))
        self.since = now
        return spans

    def rest(self, now: float) -> None:
        for seconds, clock in self._spans(now):
            self.idle_joules += seconds * self.model.idle_watts(clock) * self.devices

    def work(self, start: float, draw: Draw, later: Draw | None, scatter: float) -> float:
        """Counts a step that begins now; returns its end. `later`: the same step at the clock that is pending."""
        left = 1.0
        if self.pending and later is not None:
            seconds = draw.seconds * scatter
            until = self.pending[0] - start
            if until < seconds:
                self._count(until, draw)
                left = 1 - until / seconds
                self.clock, self.pending, draw = self.pending[1], None, later
        self._count(draw.seconds * scatter * left, draw)
        return self.since

    def _count(self, seconds: float, draw: Draw) -> None:
        self.busy_joules += seconds * draw.watts * self.devices
        self.busy += seconds
        self.clock_seconds += seconds * draw.clock
        self.since += seconds


@dataclass
class _Prefill(_Instance):
    queue: deque[tuple[float, int]] = field(default_factory=deque)  # arrival, number of the request
    waiting_tokens: int = 0
    running: bool = False


@dataclass
class _Decode(_Instance):
    waiting: deque[int] = field(default_factory=deque)
    finishing: list[tuple[int, int]] = field(default_factory=list)  # the step that ends it, the request
    steps: int = 0
    context: int = 0
    waiting_context: int = 0
    running: bool = False
    batch_seconds: float = 0.0

    @property
    def load(self) -> Load:
        """With those that will join at the next step."""
        return Load(len(self.finishing) + len(self.waiting), self.context + self.waiting_context)


def serve_trace(
    trace: Sequence[Request],
    fleet: Fleet,
    slo: Slo,
    policy: str | float = "voltana",
    *,
    clocks: Sequence[float] | None = None,
    margin: float = 0.1,
    scatter: float = 0.02,
    seed: int = 0,
    pricing: Pricing | None = None,
) -> Outcome:
    """`clocks`: that a controller may choose among; None: every 105 MHz of the device's range. `margin`: part of the
    SLO that it keeps in reserve."""
    pricing = pricing or Pricing(fleet.serving)
    return _Run(trace, fleet, slo, policy, clocks, margin, scatter, seed, pricing).outcome()


class _Run:
    def __init__(
        self, trace: Sequence[Request], fleet: Fleet, slo: Slo, policy: str | float, clocks: Sequence[float] | None,
        margin: float, scatter: float, seed: int, pricing: Pricing,
    ) -> None:  # fmt: skip
        if not trace:
            raise UserError("trace", "no requests", "Give a longer trace or a higher rate.")
        self.trace, self.fleet, self.slo, self.policy, self.pricing = trace, fleet, slo, policy, pricing
        self.scatter, self.draw = scatter, random.Random(seed)
        typical = max(1, sequences_that_fit(fleet.serving, TYPICAL_CONTEXT))
        if not sequences_that_fit(fleet.serving, 1):
            raise UserError(fleet.serving.model.name, f"does not fit {fleet.devices} {fleet.serving.device.name}")
        self.running = min(fleet.running, typical)
        model = pricing.model
        self.clocks = tuple(clocks) if clocks else model.levels()
        for clock in (*self.clocks, *([policy] if isinstance(policy, (int, float)) else [])):
            if not model.lowest <= clock <= model.highest:
                span = f"{model.lowest:.0f} to {model.highest:.0f} MHz"
                raise UserError(f"clock {clock:.0f}", f"{fleet.serving.device.name} has {span}")
        self.prefills = [self._prefill(model, margin) for _ in range(fleet.prefill)]
        self.decodes = [self._decode(model, margin) for _ in range(fleet.decode)]
        self.events: list[tuple[float, int, str, int]] = []
        self.order = 0
        self.first = [0.0] * len(trace)
        self.last = [0.0] * len(trace)
        self.turn = 0
        self.cache_bytes = sequence_bytes(fleet.serving, 1)

    def _control(self, phase: Phase, model: ClockModel, margin: float) -> Control:
        return control_for(self.policy, phase, self.pricing, self.clocks, self.slo, self.running, margin)

    def _prefill(self, model: ClockModel, margin: float) -> _Prefill:
        control = self._control("prefill", model, margin)
        return _Prefill(model, control, self.fleet.devices, control.idle_clock(model.highest))

    def _decode(self, model: ClockModel, margin: float) -> _Decode:
        control = self._control("decode", model, margin)
        return _Decode(model, control, self.fleet.devices, control.idle_clock(model.highest))

    def _at(self, time: float, what: str, which: int) -> None:
        heapq.heappush(self.events, (time, self.order, what, which))
        self.order += 1

    def outcome(self) -> Outcome:
        for number, request in enumerate(self.trace):
            self._at(request.arrival, "arrive", number)
        now = 0.0
        while self.events:
            now, _, what, which = heapq.heappop(self.events)
            getattr(self, f"_{what}")(now, which)
        for instance in (*self.prefills, *self.decodes):
            instance.rest(now)
        return self._report(now)

    def _arrive(self, now: float, number: int) -> None:
        which = min(range(len(self.prefills)), key=lambda index: self.prefills[index].waiting_tokens)
        instance = self.prefills[which]
        instance.queue.append((now, number))
        instance.waiting_tokens += self.trace[number].prompt
        if not instance.running:
            self._start_prefill(now, which)

    def _start_prefill(self, now: float, which: int) -> None:
        instance = self.prefills[which]
        instance.rest(now)
        steps: list[list[tuple[float, int]]] = []
        tokens = 0
        for entry in instance.queue:
            prompt = self.trace[entry[1]].prompt
            if not steps or tokens + prompt > self.fleet.prefill_tokens:
                steps.append([])
                tokens = 0
            steps[-1].append(entry)
            tokens += prompt
        queue = [Queued(self._prompt_load(step), step[0][0] + self.slo.ttft - now) for step in steps]
        instance.ask(now, instance.control.prefill_clock(queue))
        instance.running = True
        for _ in steps[0]:
            instance.queue.popleft()
        load = queue[0].load
        end = self._work(instance, self.pricing.prefill, load, now)
        for _, number in steps[0]:
            self.first[number] = end
            instance.waiting_tokens -= self.trace[number].prompt
            self._at(end + self._transfer(number), "decode_arrive", number)
        self._at(end, "prefilled", which)

    def _prompt_load(self, step: Sequence[tuple[float, int]]) -> Load:
        prompts = [self.trace[number].prompt for _, number in step]
        return Load(sum(prompts), round(sum(prompt * prompt for prompt in prompts) / (2 * sum(prompts))))

    def _transfer(self, number: int) -> float:
        """The KV cache goes to the decode instance over the network."""
        device = self.fleet.serving.device
        return self.cache_bytes * self.trace[number].prompt / (device.network * device.network_share) + 1e-3

    def _work(self, instance: _Instance, price: Callable[[Load, float], Draw], load: Load, now: float) -> float:
        scatter = math.exp(self.draw.gauss(0.0, self.scatter)) if self.scatter else 1.0
        held = instance.clock
        later = price(load, instance.pending[1]) if instance.pending else None
        end = instance.work(now, price(load, held), later, scatter)
        if held == instance.clock:  # a step with two clocks says nothing about either
            instance.control.observe(held, load, end - now)
        return end

    def _prefilled(self, now: float, which: int) -> None:
        instance = self.prefills[which]
        instance.running = False
        if instance.queue:
            self._start_prefill(now, which)
        else:
            instance.ask(now, instance.control.idle_clock(instance.clock))

    def _decode_arrive(self, now: float, number: int) -> None:
        request = self.trace[number]
        if request.output <= 1:
            self.last[number] = self.first[number]
            return
        which = self._route(request.prompt)
        instance = self.decodes[which]
        instance.waiting.append(number)
        instance.waiting_context += request.prompt
        if not instance.running:
            self._step(now, which)

    def _route(self, prompt: int) -> int:
        if self.policy == "voltana":
            controls = [instance.control for instance in self.decodes if isinstance(instance.control, VoltanaControl)]
            return route_by_power(controls, [instance.load for instance in self.decodes], prompt)
        if self.policy == "live":
            loads = [instance.load for instance in self.decodes]
            lives = [instance.control for instance in self.decodes if isinstance(instance.control, LiveControl)]
            rooms = [live.room(load, prompt) for live, load in zip(lives, loads, strict=True)]
            return route(rooms, [load.batch for load in loads])
        self.turn += 1
        return self.turn % len(self.decodes)

    def _step(self, now: float, which: int) -> None:
        """Sequences that are done leave, those that wait join, and the next step begins."""
        instance = self.decodes[which]
        instance.rest(now)
        while instance.finishing and instance.finishing[0][0] <= instance.steps:
            _, number = heapq.heappop(instance.finishing)
            instance.context -= self.trace[number].prompt + self.trace[number].output - 1
            self.last[number] = now
        while instance.waiting and len(instance.finishing) < self.running:
            number = instance.waiting.popleft()
            instance.waiting_context -= self.trace[number].prompt
            instance.context += self.trace[number].prompt
            heapq.heappush(instance.finishing, (instance.steps + self.trace[number].output - 1, number))
        instance.running = bool(instance.finishing)
        if not instance.running:
            instance.ask(now, instance.control.idle_clock(instance.clock))
            return
        instance.ask(now, instance.control.decode_clock(instance.load))
        load = Load(len(instance.finishing), instance.context)
        end = self._work(instance, self.pricing.decode, load, now)
        instance.steps += 1
        instance.context += load.batch
        instance.batch_seconds += load.batch * (end - now)
        self._at(end, "step", which)

    def _report(self, now: float) -> Outcome:
        ttft = [first - request.arrival for first, request in zip(self.first, self.trace)]
        tpot = [
            (last - first) / (request.output - 1) if request.output > 1 else 0.0
            for first, last, request in zip(self.first, self.last, self.trace)
        ]
        early = [value <= self.slo.ttft for value in ttft]
        smooth = [value <= self.slo.tpot for value in tpot]
        count = len(self.trace)
        prefill, decode = _Meter(self.prefills), _Meter(self.decodes)
        return Outcome(
            policy=self.policy if isinstance(self.policy, str) else f"{self.policy:.0f} MHz",
            requests=count,
            tokens=sum(request.output for request in self.trace),
            seconds=now,
            joules=prefill.joules + decode.joules,
            prefill_joules=prefill.joules,
            decode_joules=decode.joules,
            idle_joules=prefill.idle + decode.idle,
            attainment=sum(a and b for a, b in zip(early, smooth)) / count,
            ttft_attainment=sum(early) / count,
            tpot_attainment=sum(smooth) / count,
            ttft_p99=_percentile(ttft, 0.99),
            tpot_p99=_percentile(tpot, 0.99),
            prefill_clock=prefill.clock,
            decode_clock=decode.clock,
            batch=sum(instance.batch_seconds for instance in self.decodes) / max(1e-9, decode.busy),
            clock_changes=sum(instance.changes for instance in (*self.prefills, *self.decodes)),
        )


class _Meter:
    def __init__(self, instances: Sequence[_Instance]) -> None:
        self.idle = sum(instance.idle_joules for instance in instances)
        self.joules = self.idle + sum(instance.busy_joules for instance in instances)
        self.busy = sum(instance.busy for instance in instances)
        self.clock = sum(instance.clock_seconds for instance in instances) / max(1e-9, self.busy)


def _percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, math.ceil(share * len(values)) - 1)]
