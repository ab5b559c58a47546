"""Power and time of a device against its clock, and where on that curve a step of work costs least.

Time: work of the tensor cores takes 1/clock; the memory keeps its bandwidth down to a knee, and slows below it. Power:
what idling at this clock draws, plus the memory's for the bandwidth reached, plus the cores' for the share of their
rate reached times clock x voltage squared. Above the power limit the clock falls until it is met, as hardware does it.
Form and constants were measured on an H200 with locked clocks (`bench/gpu_clocks.py`, docs/plan-energy.md); other
devices have the same shares of their own power and clock until somebody measures them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from moesaic.errors import UserError
from moesaic.plan.hardware import Device

OVERLAP = 4  # the norm that joins compute and memory time, as in cost.py
VOLTAGE = 0.65  # the cores' voltage squared grows as 1 + this x (clock / highest)^2
IDLE_EXPONENT = 3.2
MEMORY_EXPONENT = 0.7  # above the knee the same bandwidth costs more power: (clock / knee) to this
KNEE_EXPONENT = 1.24  # below the knee the memory's time grows as (knee / clock) to this
SLOWEST_MEMORY = 2.65  # and not further: its own clock stops falling
STEP = 15.0  # MHz between two clocks a driver offers
# Shares of the power limit and of the highest clock, where a device does not say otherwise: an H200's.
CORE_SHARE, MEMORY_SHARE, CLOCK_IDLE_SHARE = 1.25, 0.66, 0.07
KNEE_SHARE, SUSTAINED_SHARE, LOWEST_SHARE = 0.75, 0.74, 0.175


class Draw(NamedTuple):
    """One piece of work at one clock. `clock` is what the power limit leaves of the clock asked for."""

    seconds: float
    watts: float
    clock: float

    @property
    def joules(self) -> float:
        return self.seconds * self.watts


@dataclass(frozen=True)
class Work:
    """Seconds that a step needs of the tensor cores (at the clock large matmuls sustain), of the memory (at the clock
    where it is fastest), and of neither (launches, the host); and which share of their peaks the first two reach."""

    compute: float
    memory: float
    other: float = 0.0
    core_share: float = 1.0  # of what large matmuls reach
    memory_share: float = 1.0  # of the full bandwidth


@dataclass(frozen=True)
class ClockModel:
    """A device's curve, with defaults filled in. Watts and MHz."""

    highest: float
    lowest: float
    sustained: float  # the clock that `Work.compute` is priced at
    knee: float
    idle: float
    clock_idle: float  # above `idle` when nothing runs at the highest clock
    core: float
    memory: float
    limit: float

    def memory_slowdown(self, clock: float) -> float:
        return float(min(SLOWEST_MEMORY, max(1.0, (self.knee / clock) ** KNEE_EXPONENT)))

    def idle_watts(self, clock: float) -> float:
        return float(self.idle + self.clock_idle * (clock / self.highest) ** IDLE_EXPONENT)

    def levels(self, step: float = 105.0) -> tuple[float, ...]:
        """Clocks a controller chooses among, the highest one included."""
        count = int((self.highest - self.lowest) / step)
        return tuple(self.highest - step * number for number in range(count, -1, -1))

    def seconds(self, work: Work, clock: float) -> float:
        compute = work.compute * self.sustained / clock
        memory = work.memory * self.memory_slowdown(clock)
        return float((compute**OVERLAP + memory**OVERLAP) ** (1 / OVERLAP) + work.other)

    def unlimited(self, work: Work, clock: float) -> Draw:
        """As if the power had no limit."""
        seconds = self.seconds(work, clock)
        if not seconds:
            return Draw(0.0, self.idle_watts(clock), clock)
        cores = work.core_share * work.compute * self.sustained / clock / seconds
        memory = work.memory_share * work.memory / seconds
        share = clock / self.highest
        watts = self.core * share * (1 + VOLTAGE * share**2) / (1 + VOLTAGE) * cores
        watts += self.memory * max(1.0, clock / self.knee) ** MEMORY_EXPONENT * memory
        return Draw(seconds, self.idle_watts(clock) + watts, clock)

    def run(self, work: Work, clock: float) -> Draw:
        draw = self.unlimited(work, clock)
        if draw.watts <= self.limit:
            return draw
        low, high = self.lowest, clock
        for _ in range(24):
            middle = (low + high) / 2
            if self.unlimited(work, middle).watts > self.limit:
                high = middle
            else:
                low = middle
        return self.unlimited(work, low)

    def best_clock(self, work: Work, clocks: Iterable[float] | None = None) -> float:
        """The clock that spends the least energy on this work: the bottom of the U."""
        return min(clocks or self.levels(STEP), key=lambda clock: self.run(work, clock).joules)


def clock_model(device: Device) -> ClockModel:
    highest = device.clock or 1980.0
    lowest = device.lowest_clock or highest * LOWEST_SHARE
    if lowest > highest:
        raise UserError(f"hardware {device.name}: lowest_clock", f"{lowest} MHz is above clock = {highest} MHz")
    return ClockModel(
        highest,
        lowest,
        device.sustained_clock or highest * SUSTAINED_SHARE,
        device.knee_clock or highest * KNEE_SHARE,
        device.idle_power,
        device.clock_idle_power or CLOCK_IDLE_SHARE * device.power,
        device.core_power or CORE_SHARE * device.power,
        device.memory_power or MEMORY_SHARE * device.power,
        device.power,
    )
