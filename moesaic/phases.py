"""Where the time of a step goes: the seconds of each of its phases, an inner phase's not counted in the outer one.

    clock = PhaseClock(("generate", "reward", "forward"), device)
    with clock:                        # from here on phases of this thread are timed; without a clock they cost nothing
        with phase("generate"):
            with phase("reward"): ...
        clock.take(seconds=2.0)        # {"time/generate": 1.2, "time/reward": 0.1, ..., "time/other": 0.3}; starts anew

On a GPU, work is queued: there a phase ends when what it has queued is done.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar, Token
from typing import Any

import torch

PREFIX = "time/"  # of their names among a step's metrics
OTHER = "other"  # what is left of a step

_running: ContextVar[PhaseClock | None] = ContextVar("running", default=None)


def phase(name: str) -> AbstractContextManager[None]:
    """What is done within belongs to this phase of the step."""
    clock = _running.get()
    return nullcontext() if clock is None or name not in clock.seconds else clock.phase(name)


class PhaseClock:
    """Times some phases; without any it does nothing."""

    def __init__(self, names: Sequence[str], device: torch.device) -> None:
        self.seconds, self.device = dict.fromkeys(names, 0.0), device
        self._within: list[str] = []
        self._since = 0.0
        self._token: Token[PhaseClock | None] | None = None

    def __enter__(self) -> PhaseClock:
        self._token = _running.set(self)
        return self

    def __exit__(self, *error: object) -> None:
        assert self._token is not None
        _running.reset(self._token)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._count()
        self._within.append(name)
        try:
            yield
        finally:
            self._count()
            self._within.pop()

    def _count(self) -> None:
        """What has passed belongs to the innermost phase."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        if self._within:
            self.seconds[self._within[-1]] += now - self._since
        self._since = now

    def take(self, seconds: float) -> dict[str, float]:
        """The phases of a step that took so long, and what is left of it."""
        if not self.seconds:
            return {}
        found = {f"{PREFIX}{name}": round(spent, 6) for name, spent in self.seconds.items()}
        self.seconds = dict.fromkeys(self.seconds, 0.0)
        return found | {f"{PREFIX}{OTHER}": max(0.0, round(seconds - sum(found.values()), 6))}


def phase_totals(lines: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Seconds of each phase over a run's metrics, the longest first."""
    totals: dict[str, float] = {}
    for line in lines:
        for key, value in line.items():
            if key.startswith(PREFIX):
                name = key.removeprefix(PREFIX)
                totals[name] = totals.get(name, 0.0) + value
    return {name: round(total, 3) for name, total in sorted(totals.items(), key=lambda item: -item[1])}


def phase_shares(totals: Mapping[str, float]) -> str:
    """In words: generate 61 %, forward 12 %."""
    whole = sum(totals.values()) or 1.0
    return ", ".join(f"{name} {100 * total / whole:.0f} %" for name, total in totals.items() if total >= whole / 200)
