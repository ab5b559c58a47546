"""Loss spike detection, one step late so that the host never waits for the device; a spike makes the run rewind."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

MAX_NONFINITE = 30  # consecutive non-finite steps: more than a loss scale can be halved


@dataclass
class RunningMoments:
    """Mean and variance of what was seen, in which the last fifty values or so count."""

    mean: float = 0.0
    variance: float = 0.0
    seen: int = 0

    def add(self, value: float) -> None:
        self.seen += 1
        rate = max(0.02, 1 / self.seen)
        gap = value - self.mean
        self.mean += rate * gap
        self.variance = (1 - rate) * (self.variance + rate * gap * gap)

    def limit(self, sigmas: float) -> float:
        return self.mean + sigmas * math.sqrt(self.variance) + 1e-3 * abs(self.mean)


@dataclass
class SpikeDetector:
    """A spike is a loss `sigmas` standard deviations above its running mean for `patience` consecutive steps; 0 sigmas
    turns that off. Non-finite steps are skipped and change nothing; where they do not end, the weights are lost."""

    sigmas: float = 8.0
    patience: int = 2
    warmup: int = 50
    losses: RunningMoments = field(default_factory=RunningMoments)
    high: int = 0  # steps in a row whose loss was too high
    lost: int = 0  # and that were not finite
    pending: Tensor | None = None

    @property
    def bad(self) -> int:
        """Steps since the last good one."""
        return self.high + self.lost

    def spiked(self, loss: Tensor, skipped: Tensor) -> bool:
        last, self.pending = self.pending, torch.where(skipped, torch.nan, loss.detach())
        if last is None:
            return False
        value = float(last)
        if not math.isfinite(value):
            self.lost += 1
            return self.lost >= MAX_NONFINITE
        if self.sigmas and self.losses.seen >= self.warmup and value > self.losses.limit(self.sigmas):
            self.high += 1
            return self.high >= self.patience
        self.high = self.lost = 0
        self.losses.add(value)
        return False

    def state(self) -> dict[str, Any]:
        pending = None if self.pending is None else float(self.pending)
        return {"pending": pending, "high": self.high, "lost": self.lost, **asdict(self.losses)}

    def restore(self, state: dict[str, Any]) -> None:
        self.losses = RunningMoments(state["mean"], state["variance"], state["seen"])
        self.high, self.lost = state["high"], state.get("lost", 0)
        # Through float64, so that the value compared after a resume is the one that was saved.
        self.pending = None if state["pending"] is None else torch.tensor(state["pending"], dtype=torch.float64)
