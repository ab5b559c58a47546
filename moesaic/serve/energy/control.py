"""VoltanaLLM's frequency control (arXiv 2509.04827) from nothing but measurements: no profile, no power model.

    control = FrequencyControl(levels, Slo(ttft=0.5, tpot=0.04))
    control.observe("decode", clock, load, seconds)         after every step
    clock = control.step_clock(load, queue)                 before the next one

Each phase learns how long its steps take by load, and how much longer at each clock. Of a clock that was never held it
believes the worst that hardware does, so that it comes down step by step and never from an SLO that is met to one that
is missed; what it has learned of a clock it keeps, so that it does not go back and forth. Pure: it reads no time and
sets no clock. `plan/energy` simulates it, `governor.py` runs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from moesaic.errors import UserError

# Below its knee a memory slows a little faster than the clock falls: (clock / lower clock) to 1.24 on an H200, where
# tensor cores take 1 (docs/plan-energy.md).
STEEPEST = 1.25
FORGET = 0.02  # weight of the newest step in what is known of loads
LEARN = 0.2  # weight of the newest step in what is known of a clock
SETTLED = 6  # steps at a clock before it is believed
STALE = 2000  # steps after which a clock that was not held since is unknown again
FIRST = 8  # steps at the highest clock before any other
HYSTERESIS = 0.04  # of the SLO, below which a lower clock must stay to be taken
FULL = 0.85  # of the sequences that have room: beyond it a decode instance runs at its highest clock
EFFICIENT = 0.6  # of the highest clock: a prefill, a fixed amount of work, costs more energy below it

Phase = Literal["prefill", "decode"]


class Slo(NamedTuple):
    """Seconds to the first token, and per further token on average, that a request may take at most."""

    ttft: float
    tpot: float


class Load(NamedTuple):
    """Of one instance: sequences that decode and the tokens in their cache; or prompt tokens to prefill."""

    batch: int
    context: int


class Queued(NamedTuple):
    """A prefill step that waits: its prompt tokens, and the seconds until its first token is due."""

    load: Load
    left: float


class PhaseModel:
    """Seconds of a phase's steps: a line over batch and context at the highest clock, times a ratio for each clock."""

    def __init__(self, levels: Sequence[float]) -> None:
        self.levels = tuple(sorted(levels))
        self.ratios: dict[float, float] = {self.levels[-1]: 1.0}
        self.seen: dict[float, int] = {}
        self._squares_33 = np.zeros((3, 3))
        self._sums_3 = np.zeros(3)
        self._line_3 = np.zeros(3)
        self._batches = self._contexts = (1 << 60, 0)  # the smallest and the largest so far
        self._learned: dict[float, int] = {}  # when a clock was last heard of
        self._steps = 0

    @property
    def ready(self) -> bool:
        return self.seen.get(self.levels[-1], 0) >= FIRST

    def observe(self, clock: float, load: Load, seconds: float) -> None:
        if clock not in self.levels or seconds <= 0 or not load.batch:
            return
        self._steps += 1
        # A load like none before says nothing of its clock: what is surprising may be either.
        low, high = self._batches
        if clock != self.levels[-1] and self.ready and low <= load.batch <= high:
            self._learn(clock, seconds / self.at_highest(load))
        count = self.seen[clock] = self.seen.get(clock, 0) + 1
        if clock == self.levels[-1] or count > SETTLED or not low <= load.batch <= high:
            self._fit(load, seconds / self.ratio(clock))

    def _learn(self, clock: float, ratio: float) -> None:
        # Of the first steps the slowest counts: some of them still ran at the clock before.
        known = self.ratios.get(clock)
        if known is None or self.seen.get(clock, 0) < SETTLED:
            ratio = max(known or 0.0, ratio)
        else:
            ratio = known + LEARN * (ratio - known)
        self.ratios[clock] = min(max(1.0, ratio), (self.levels[-1] / clock) ** STEEPEST)
        self._learned[clock] = self._steps
        for other in [one for one, when in self._learned.items() if self._steps - when > STALE]:
            del self.ratios[other], self._learned[other]  # if it can be in time, let it be tried again
            self.seen[other] = 0

    def _fit(self, load: Load, seconds: float) -> None:
        """Relative errors count: short steps matter as much as long ones."""
        self._batches = min(self._batches[0], load.batch), max(self._batches[1], load.batch)
        self._contexts = min(self._contexts[0], load.context), max(self._contexts[1], load.context)
        row_3 = np.array([1.0, load.batch, load.context / 1024]) / seconds
        self._squares_33 = (1 - FORGET) * self._squares_33 + np.outer(row_3, row_3)
        self._sums_3 = (1 - FORGET) * self._sums_3 + row_3
        # A larger load is never faster: a term that would say so is left out. And a little is added to the diagonal,
        # because steps of one size say nothing of others.
        used = [0, 1, 2]
        while used:
            squares = self._squares_33[np.ix_(used, used)]
            found = np.linalg.solve(squares + 1e-9 * np.trace(squares) * np.eye(len(used)), self._sums_3[used])
            if found.min() >= 0:
                break
            used.pop(int(found.argmin()))
        self._line_3 = np.zeros(3)
        self._line_3[used] = found

    def at_highest(self, load: Load) -> float:
        """A load smaller than any so far is taken for the smallest: how much faster it is nobody knows."""
        batch, context = max(load.batch, self._batches[0]), max(load.context, self._contexts[0])
        fixed, per_sequence, per_token = self._line_3
        return float(fixed + per_sequence * batch + per_token * context / 1024)

    def ratio(self, clock: float) -> float:
        """How much longer a step takes than at the highest clock; of a clock that is not known, at most."""
        if clock in self.ratios:
            return self.ratios[clock]
        above = min(ratio * (known / clock) ** STEEPEST for known, ratio in self.ratios.items() if known > clock)
        return min([above, *(ratio for known, ratio in self.ratios.items() if known < clock)])

    def seconds(self, clock: float, load: Load) -> float:
        return self.at_highest(load) * self.ratio(clock) if self.ready else float("inf")

    def lowest(self, load: Load, seconds: float, held: float) -> float:
        """The lowest clock at which a step takes no longer; the one held, unless a lower one is well within."""
        levels = self.levels
        for clock in levels:
            allowed = seconds * (1 - HYSTERESIS) if clock < held else seconds
            if self.seconds(clock, load) <= allowed:
                return clock
        return levels[-1]


@dataclass
class FrequencyControl:
    """Clocks of one instance, which may prefill, decode, or do both."""

    levels: Sequence[float]  # MHz
    slo: Slo
    capacity: int = 1 << 30  # sequences it decodes at once
    margin: float = 0.1  # of the SLO that is kept in reserve: steps vary, and a clock takes a while to change
    models: dict[Phase, PhaseModel] = field(init=False)

    def __post_init__(self) -> None:
        if not self.levels or min(self.levels) <= 0:
            raise UserError("clocks", "there is none to choose from")
        if min(self.slo) <= 0 or not 0 <= self.margin < 1:
            raise UserError("SLO", f"{self.slo} must be above 0, and its margin between 0 and 1")
        self.levels = tuple(sorted(self.levels))
        self.models = {"prefill": PhaseModel(self.levels), "decode": PhaseModel(self.levels)}
        self.held: dict[Phase, float] = {"prefill": self.levels[-1], "decode": self.levels[-1]}
        self.stretch = 1.0  # seconds between a request's tokens over those of a decode step: prefills come between

    def observe(self, phase: Phase, clock: float, load: Load, seconds: float) -> None:
        self.models[phase].observe(clock, load, seconds)

    def observe_interval(self, seconds: float, decode: Load, clock: float) -> None:
        """So long a running request waited for its next token, whatever the step was for."""
        expected = self.models["decode"].seconds(clock, decode)
        if 0 < expected < float("inf"):
            self.stretch += FORGET * (max(1.0, seconds / expected) - self.stretch)

    def step_clock(self, decode: Load, queue: Sequence[Queued]) -> float:
        """For an instance that does both: whatever the more urgent of them needs."""
        clocks = [self.levels[0]]
        if decode.batch:
            clocks.append(self.decode_clock(decode))
        if queue:
            clocks.append(self.prefill_clock(queue))
        return max(clocks)

    def decode_clock(self, load: Load) -> float:
        """With a steady stream of requests a slower step only makes the batch larger: the lowest clock that keeps the
        SLO is the cheapest. Not where a larger batch has no room: others would wait."""
        self.held["decode"] = self.needed(load)
        return self.held["decode"]

    def needed(self, load: Load) -> float:
        """The clock that a load would need."""
        if load.batch > self.capacity * FULL:
            return self.levels[-1]
        target = self.slo.tpot * (1 - self.margin) / self.stretch
        return self.models["decode"].lowest(load, target, self.held["decode"])

    def prefill_clock(self, queue: Sequence[Queued]) -> float:
        """The lowest clock that keeps every deadline of the queue, but none where prompts cost more energy."""
        model, floor = self.models["prefill"], self.levels[-1] * EFFICIENT
        allowed = [clock for clock in self.levels if clock >= floor and self._in_time(model, clock, queue)]
        self.held["prefill"] = allowed[0] if allowed else self.levels[-1]
        return self.held["prefill"]

    def _in_time(self, model: PhaseModel, clock: float, queue: Sequence[Queued]) -> bool:
        passed = 0.0
        reserve = self.margin + (HYSTERESIS if clock < self.held["prefill"] else 0.0)
        for waiting in queue:
            passed += model.seconds(clock, waiting.load)
            if passed > waiting.left - reserve * self.slo.ttft:
                return False
        return True

    def idle_clock(self, held: float) -> float:
        return self.levels[0]

    def in_time(self, load: Load) -> bool:
        """Whether a load can be decoded within the SLO at all."""
        if load.batch > self.capacity:
            return False
        model = self.models["decode"]
        return not model.ready or model.seconds(self.levels[-1], load) <= self.slo.tpot * (1 - self.margin)
