"""VoltanaLLM (arXiv 2509.04827): the clock of every serving instance, by feedback, phase by phase; and a router that
knows what one more request does to it.

`LatencyPredictor` is its EcoPred: for every clock a line over batch and context, fitted to profiled steps, times what
the last steps took over what was predicted. `VoltanaControl` is its EcoFreq: decode runs at the lowest clock that meets
the time per output token, prefill at the clock that spends least among those that meet every queued request's deadline.
`route` is its EcoRoute: to the decode instance whose power grows least, so that none is lifted over a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from moesaic.errors import UserError
from moesaic.plan.energy.clocks import ClockModel, Draw
from moesaic.serve.energy.control import FULL, Load, Queued, Slo

FORGET = 0.1  # weight of the newest step in the feedback


Profile = Callable[[Load, float], Draw]  # a step with this load at this clock


class LatencyPredictor:
    """Seconds of a step by clock and load: a line per clock, and one ratio for how wrong it has been lately."""

    def __init__(self, levels: Sequence[float], loads: Sequence[Load], profile: Profile) -> None:
        features = np.array([[1.0, load.batch, load.context] for load in loads])
        if len(loads) < 3 or np.linalg.matrix_rank(features) < 2:
            raise UserError("latency predictor", "needs profiled loads of different sizes")
        self.levels = tuple(sorted(levels))
        self.lines: dict[float, tuple[float, float, float]] = {}
        for clock in self.levels:
            seconds = np.array([profile(load, clock).seconds for load in loads])
            # Relative errors count: short steps matter as much as long ones.
            line = np.linalg.lstsq(features / seconds[:, None], np.ones(len(loads)), rcond=None)[0]
            self.lines[clock] = (float(line[0]), float(line[1]), float(line[2]))
        self.ratio = 1.0

    def expected(self, clock: float, load: Load) -> float:
        fixed, per_sequence, per_token = self.lines[clock]
        return max(0.0, fixed + per_sequence * load.batch + per_token * load.context)

    def seconds(self, clock: float, load: Load) -> float:
        return self.ratio * self.expected(clock, load)

    def observe(self, clock: float, load: Load, seconds: float) -> None:
        expected = self.expected(clock, load)
        if expected > 0:
            self.ratio += FORGET * (min(2.0, max(0.5, seconds / expected)) - self.ratio)


class Control(Protocol):
    """Chooses clocks for one instance."""

    def decode_clock(self, load: Load) -> float: ...
    def prefill_clock(self, queue: Sequence[Queued]) -> float: ...
    def idle_clock(self, held: float) -> float: ...
    def observe(self, clock: float, load: Load, seconds: float) -> None: ...


@dataclass(frozen=True)
class FixedClock:
    """As operators lock it: one clock, working or not."""

    clock: float

    def decode_clock(self, load: Load) -> float:
        return self.clock

    def prefill_clock(self, queue: Sequence[Queued]) -> float:
        return self.clock

    def idle_clock(self, held: float) -> float:
        return self.clock

    def observe(self, clock: float, load: Load, seconds: float) -> None:
        pass


@dataclass
class VoltanaControl:
    predictor: LatencyPredictor
    model: ClockModel
    profile: Profile
    slo: Slo
    capacity: int = 1 << 30  # sequences an instance decodes at once
    margin: float = 0.1  # of the SLO that is kept in reserve: steps vary, and a clock takes a while to change
    _watts: dict[tuple[float, Load], float] = field(default_factory=dict)

    def decode_clock(self, load: Load) -> float:
        """With a steady stream of requests a slower step only makes the batch larger: power is what costs, so the
        lowest clock that keeps the SLO is the cheapest. Not where a larger batch has no room: others would wait."""
        if load.batch > self.capacity * FULL:
            return self.predictor.levels[-1]
        return self._lowest(load, self.slo.tpot * (1 - self.margin))

    def _lowest(self, load: Load, seconds: float) -> float:
        levels = self.predictor.levels
        return next((clock for clock in levels if self.predictor.seconds(clock, load) <= seconds), levels[-1])

    def prefill_clock(self, queue: Sequence[Queued]) -> float:
        """A prefill is a fixed amount of work: the energy above idling counts, under every deadline in the queue."""
        levels = self.predictor.levels
        allowed = [clock for clock in levels if self._in_time(clock, queue)]
        if not allowed:
            return levels[-1]
        idle = self.model.idle_watts(levels[0])

        def energy(clock: float) -> float:
            draw = self.profile(queue[0].load, clock)
            return draw.seconds * (draw.watts - idle)

        return min(allowed, key=energy)

    def _in_time(self, clock: float, queue: Sequence[Queued]) -> bool:
        passed = 0.0
        for waiting in queue:
            passed += self.predictor.seconds(clock, waiting.load)
            if passed > waiting.left - self.margin * self.slo.ttft:
                return False
        return True

    def idle_clock(self, held: float) -> float:
        return self.predictor.levels[0]

    def observe(self, clock: float, load: Load, seconds: float) -> None:
        self.predictor.observe(clock, load, seconds)

    def watts(self, load: Load) -> float:
        """What the instance would draw with this load at the clock it would then need."""
        if not load.batch:
            return self.model.idle_watts(self.predictor.levels[0])
        coarse = Load(load.batch, load.context // 2048 * 2048)
        clock = self.decode_clock(coarse)
        key = (clock, coarse)
        if key not in self._watts:
            self._watts[key] = self.profile(coarse, clock).watts
        return self._watts[key]

    def overloaded(self, load: Load) -> bool:
        slow = self.predictor.seconds(self.predictor.levels[-1], load) > self.slo.tpot * (1 - self.margin)
        return slow or load.batch > self.capacity


def route(controls: Sequence[VoltanaControl], loads: Sequence[Load], prompt: int) -> int:
    """The decode instance for one more sequence of `prompt` tokens: the one whose power grows least; where none can
    take it in time, the emptiest."""
    grown = [Load(load.batch + 1, load.context + prompt) for load in loads]
    open_ = [number for number, load in enumerate(grown) if not controls[number].overloaded(load)]
    if not open_:
        return min(range(len(loads)), key=lambda number: loads[number].batch)
    return min(
        open_,
        key=lambda number: (
            round(controls[number].watts(grown[number]) - controls[number].watts(loads[number]), 3),
            loads[number].batch,
        ),
    )
