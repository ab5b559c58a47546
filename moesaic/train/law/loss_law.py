"""The multi-power law of loss curves (A Multi-Power Law for Loss Curve Prediction Across Learning Rate Schedules).

    law = fit([read_run("out/constant"), read_run("out/cosine")]).law        # law_fit.py, law_runs.py
    losses = law.predict(curve(WarmupStableDecay(), 2000, peak=3e-3))         # of a schedule that was never run
    best = optimize(law, steps=2000, peak=3e-3)                               # law_optimize.py

With lr_0, lr_1, ... the learning rates after warm-up, the loss at step t is

    L(t) = L0 + A (S1(t) + Sw)^-alpha - B sum_{k=1..t} (lr_{k-1} - lr_k) G(lr_k^-gamma S_k(t))
    G(x) = 1 - (C x + 1)^-beta

S1(t) is the sum of learning rates up to t, Sw that over the warm-up, and S_k(t) the sum from k to t. The power of S1 is
what a constant rate would reach; each decrease of the rate then takes a part off the loss, which grows to B times the
decrease as training goes on at the lower rate.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moesaic import atomic
from moesaic.errors import UserError
from moesaic.json_files import read_json

Array = NDArray[np.float64]
Steps = NDArray[np.int64]

CHUNK = 500_000  # pairs of a step and a change of the rate that are held in memory at a time
BUDGET = 15_000_000  # pairs up to which every step is computed by itself: some tenths of a second
FEWEST = 256  # steps that are computed in any case; those between are interpolated
# A rate of zero has no negative power. This share of the peak stands for it, and G there is as good as 0 or 1.
SMALLEST = 1e-9


@dataclass(frozen=True)
class LossLaw:
    """The seven constants of the law, for learning rates as they are given to the optimizer."""

    L0: float
    A: float
    alpha: float
    B: float
    C: float
    beta: float
    gamma: float

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} must be a finite number from 0 up, found {value}")

    def predict(self, rates: Array, warmup_sum: float = 0.0, at: Steps | None = None) -> Array:
        """The loss at each step after warm-up, or only at the steps `at`, which must ascend.

        Exact, except that over a very long schedule that changes in every step the decreases' part is computed at
        some hundreds of steps and interpolated between them.
        """
        rates = checked(rates)
        sums = np.cumsum(rates)
        changes = changed(rates)
        if at is not None:
            return self._power(sums[at] + warmup_sum) - self._drop(rates, sums, changes, at)
        every = np.arange(len(rates))
        chosen = _choose(rates, changes)
        drop = self._drop(rates, sums, changes, chosen)
        if len(chosen) < len(every):
            drop = np.interp(every, chosen, drop)
        return self._power(sums + warmup_sum) - drop

    def final(self, rates: Array, warmup_sum: float = 0.0) -> float:
        """The loss at the last step."""
        return float(self.predict(rates, warmup_sum, at=np.array([len(rates) - 1]))[0])

    def _power(self, sums: Array) -> Array:
        return np.asarray(self.L0 + self.A * sums**-self.alpha)

    def _drop(self, rates: Array, sums: Array, changes: Steps, at: Steps) -> Array:
        """What the decreases up to each step of `at` have taken off the loss there."""
        drop = np.zeros(len(at))
        if self.B == 0 or len(changes) == 0:
            return drop
        decrease = rates[changes - 1] - rates[changes]
        slope = self.C * np.maximum(rates[changes], SMALLEST * rates.max()) ** -self.gamma
        for part, known in _chunks(changes, at):
            since = sums[at[part], None] - sums[changes[:known] - 1]
            # A change that is still to come has a sum below zero, and takes nothing off.
            since = np.maximum(since, 0)
            drop[part] = -np.expm1(-self.beta * np.log1p(slope[:known] * since)) @ decrease[:known]
        return self.B * drop

    def save(self, path: str | Path, **facts: Any) -> None:
        """Write the law, and beside it whatever else is known of how it came about."""
        write_json(path, {"format": 1, "law": asdict(self), **facts})


def load_law(path: str | Path) -> tuple[LossLaw, dict[str, Any]]:
    """The law of a file, and the facts that were saved beside it."""
    content = read_json(Path(path), "Write one with moesaic law fit.")
    values = content.pop("law", None)
    names = list(LossLaw.__dataclass_fields__)
    if not isinstance(values, dict) or sorted(values) != sorted(names):
        raise UserError(
            path, "not a law file; its law must have " + ", ".join(names), "Write one with moesaic law fit."
        )
    try:
        return LossLaw(**{name: float(values[name]) for name in names}), content
    except (TypeError, ValueError) as error:
        raise UserError(path, str(error)) from None


def checked(rates: Array) -> Array:
    """Learning rates after warm-up that the law can be computed for."""
    rates = np.asarray(rates, dtype=np.float64)
    if rates.ndim != 1 or len(rates) == 0 or not np.isfinite(rates).all() or rates.min() < 0 or not rates[0] > 0:
        raise ValueError("learning rates must be a list of finite numbers from 0 up, the first of them above 0")
    return rates


def changed(rates: Array) -> Steps:
    """The steps at which the learning rate is not what it was before. Rounding is not a change."""
    return np.flatnonzero(np.abs(np.diff(rates)) > 1e-10 * rates.max()) + 1


def _choose(rates: Array, changes: Steps) -> Steps:
    """The steps to compute: all, or as many as the budget allows, with more of them where the rate changes fast."""
    steps, total = len(rates), len(changes)
    if total == 0:
        return np.unique([0, steps - 1])
    if (steps - changes[0]) * total / 2 <= BUDGET:
        return np.union1d([0], np.arange(changes[0] - 1, steps))
    many = max(FEWEST, BUDGET // total)
    moved = np.cumsum(np.abs(np.diff(rates, prepend=rates[0])))
    even = np.arange(1, steps + 1) / steps + moved / moved[-1]
    chosen = np.searchsorted(even, np.linspace(even[0], even[-1], many))
    # After a jump the loss falls fast and then ever more slowly.
    jumps = changes[np.abs(np.diff(rates)[changes - 1]) > 0.01 * rates.max()]
    after = np.unique(np.geomspace(1, steps, 64).astype(np.int64)) - 1
    more = (jumps[:, None] + after).ravel()
    return np.unique(np.concatenate([[0], chosen, jumps - 1, more, [steps - 1]]).clip(0, steps - 1))


def _chunks(changes: Steps, at: Steps) -> Iterator[tuple[slice, int]]:
    """Parts of `at` that fit in memory, each with how many changes there are up to its end."""
    known = np.searchsorted(changes, at, side="right")
    begin = 0
    while begin < len(at):
        # Few changes have come before an early step, so that early parts can be longer.
        fits = np.arange(1, len(at) - begin + 1) * known[begin:] <= CHUNK
        end = len(at) if fits.all() else begin + max(1, int(fits.argmin()))
        yield slice(begin, end), int(known[end - 1])
        begin = end


def write_json(path: str | Path, content: dict[str, Any]) -> None:
    """Write one JSON object, or raise a UserError."""
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic.write_json(path, content, indent=1)
    except OSError as error:
        raise UserError(path, f"cannot be written ({error.strerror})") from None
