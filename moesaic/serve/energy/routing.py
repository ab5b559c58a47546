"""VoltanaLLM's routing: a request goes where it lifts no clock.

Time and power of decoding grow in steps, as the clock does that a load needs. An instance says how many more sequences
it takes before that happens, and before the SLO is missed (`Headroom`); among instances with room below their next step
the fullest is taken, so that the others stay at low clocks, and where none has any, the one whose clock is lowest.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from moesaic.serve.energy.control import FrequencyControl, Load

FARTHEST = 64  # sequences that are looked ahead


class Headroom(NamedTuple):
    clock: float  # MHz that the load of now needs
    same_clock: int  # more sequences that it takes at this clock
    in_time: int  # more sequences that it takes within the SLO


def headroom(control: FrequencyControl, load: Load, prompt: int) -> Headroom:
    """For sequences of `prompt` tokens, at most `FARTHEST` of them."""
    clock = control.needed(load) if load.batch else control.levels[0]

    def grown(more: int) -> Load:
        return Load(load.batch + more, load.context + more * prompt)

    # A larger load never needs less, so that the first that is too large is found by halving.
    counts = range(1, FARTHEST + 1)
    same = bisect_left(counts, True, key=lambda more: control.needed(grown(more)) > clock)
    in_time = bisect_left(counts, True, key=lambda more: not control.in_time(grown(more)))
    return Headroom(clock, min(same, in_time), in_time)


def route(rooms: Sequence[Headroom], loads: Sequence[int]) -> int:
    """The instance for one more sequence; `loads` are how many each has now."""

    def cost(number: int) -> tuple[int, float, int]:
        room = rooms[number]
        if room.same_clock > 0:
            return 0, 0.0, -loads[number]
        return 1 if room.in_time > 0 else 2, room.clock if room.in_time > 0 else 0.0, loads[number]

    return min(range(len(rooms)), key=cost)
