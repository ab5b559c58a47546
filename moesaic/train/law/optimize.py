"""Find the schedule whose final loss the law predicts to be lowest.

    best = optimize(law, steps=2000, peak=3e-3, warmup=100)
    best.final, best.gains                       # against cosine, WSD and others of the same steps and peak
    best.save("schedule.json")                   # for schedule={name: from_file, path: schedule.json}

The learning rate may only fall, from the peak to `floor` of it at the lowest. It is described by its logarithm at some
dozen knots, which lie closer towards the end, and is straight between them; the decrease from each knot to the next
is at least zero, a bound that L-BFGS-B keeps exactly. The final loss and its gradient cost one pass over the steps.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import minimize

from moesaic.train.law.loss_law import SMALLEST, Array, LossLaw, write_json
from moesaic.train.schedules import Schedule, curve, need
from moesaic.train.schedules.constant import Constant
from moesaic.train.schedules.cosine import Cosine
from moesaic.train.schedules.linear import Linear
from moesaic.train.schedules.wsd import WarmupStableDecay
from moesaic.train.schedules.wsd_power import WarmupStablePowerDecay

# With more of them the search finds stairs: the law, being a sum over steps, rewards those by 1e-4, and no run would.
KNOTS = 64
LOWEST = 1e-4  # of the peak: a logarithm has no zero
BASELINES: dict[str, Schedule] = {
    "constant": Constant(),
    "cosine": Cosine(),
    "cosine to 0": Cosine(floor=0.0),
    "linear to 0": Linear(),
    "wsd": WarmupStableDecay(),
    "wsd_power": WarmupStablePowerDecay(),
}
STARTS = [
    Cosine(floor=0.01),
    *(WarmupStablePowerDecay(decay, floor=0.01, power=power) for decay, power in ((0.1, 1.0), (0.3, 1.5), (0.6, 2.0))),
]


@dataclass(frozen=True)
class Optimized:
    """The schedule found, and the final loss that the law predicts for it and for usual ones."""

    law: LossLaw
    rates: Array  # of every step, warm-up included
    warmup: int
    peak: float
    floor: float
    final: float
    baselines: dict[str, float]

    @property
    def gains(self) -> dict[str, float]:
        """How much lower the final loss is than each usual schedule's."""
        return {name: final - self.final for name, final in self.baselines.items()}

    def report(self) -> dict[str, Any]:
        """The result in a few values, without the curve itself."""
        facts = {"steps": len(self.rates), "warmup": self.warmup, "peak": self.peak, "final": self.final}
        return {**facts, "baselines": self.baselines, "gains": self.gains}

    def save(self, path: str | Path) -> None:
        """Write a schedule file, which the schedule from_file reads."""
        facts = {"steps": len(self.rates), "warmup": self.warmup, "peak": self.peak, "floor": self.floor}
        predictions = {"predicted_final": self.final, "baselines": self.baselines, "law": asdict(self.law)}
        factors = [float(f"{factor:.9g}") for factor in self.rates[self.warmup :] / self.peak]
        write_json(path, {"format": 1, **facts, **predictions, "factors": factors})

    def draw(self, path: str | Path) -> None:
        """Draw the predicted curve beside those of cosine and WSD."""
        from moesaic.train.law.plot import draw

        def losses(rates: Array) -> Array:
            return self.law.predict(rates[self.warmup :], float(rates[: self.warmup].sum()))

        others = {name: curve(BASELINES[name], len(self.rates), self.warmup, self.peak) for name in ("cosine", "wsd")}
        curves = {name: (rates, losses(rates)) for name, rates in others.items()}
        draw(path, "Loss curve: the schedule found best", self.rates, losses(self.rates), others=curves)


def optimize(law: LossLaw, steps: int, peak: float, warmup: int = 0, floor: float = 0.0) -> Optimized:
    """The best schedule of `steps` in all, whose first `warmup` rise to `peak` as in every run."""
    need("floor", floor, 0, 1)
    if not peak > 0:
        raise ValueError(f"the peak must be above 0, found {peak:g}")
    rise = curve(Constant(), steps, warmup, peak)[:warmup]
    after = steps - warmup
    warmup_sum = float(rise.sum())
    knots = _Knots(after, max(floor, LOWEST))

    def loss(falls: Array) -> tuple[float, Array]:
        factors, levels = knots.factors(falls)
        final, by_rate = final_and_slope(law, peak * factors, warmup_sum)
        return final, knots.slope(levels, peak * by_rate)

    def final_of(factors: Array) -> float:
        return law.final(peak * factors, warmup_sum)

    candidates = [np.ones(after)]
    for schedule in STARTS if after > 1 else []:
        start = knots.falls(np.maximum(curve(schedule, after), max(floor, LOWEST)))
        bounds = [(0.0, None)] * len(start)
        options = {"maxiter": 300, "maxcor": 20, "ftol": 1e-12, "gtol": 1e-9}
        result = minimize(loss, start, jac=True, bounds=bounds, method="L-BFGS-B", options=options)
        candidates.append(np.minimum.accumulate(knots.factors(result.x)[0].clip(floor, 1)))
    best = min(candidates, key=final_of)
    baselines = {
        name: law.final(curve(schedule, steps, warmup, peak)[warmup:], warmup_sum)
        for name, schedule in BASELINES.items()
    }
    return Optimized(law, np.concatenate([rise, peak * best]), warmup, peak, floor, final_of(best), baselines)


def final_and_slope(law: LossLaw, rates: Array, warmup_sum: float = 0.0) -> tuple[float, Array]:
    """The law's final loss, and its derivative by each learning rate."""
    total = rates.sum() + warmup_sum
    final = law.L0 + law.A * total**-law.alpha
    slope = np.full(len(rates), -law.alpha * law.A * total ** (-law.alpha - 1))
    if law.B == 0 or len(rates) == 1:
        return float(final), slope
    decrease, here = rates[:-1] - rates[1:], np.maximum(rates[1:], SMALLEST * rates.max())
    scale = here**-law.gamma
    x = scale * np.cumsum(rates[::-1])[::-1][1:]  # of the rates from each change to the end
    y = 1 + law.C * x
    gained = 1 - y**-law.beta
    by_x = decrease * law.beta * law.C * y ** (-law.beta - 1)
    # Each rate ends one decrease and begins the next, sets the speed of its own, and adds to the sum of all before it.
    by_rate = np.zeros(len(rates))
    by_rate[:-1] += gained
    by_rate[1:] += np.cumsum(by_x * scale) - gained - law.gamma * by_x * x / here
    return float(final - law.B * (decrease @ gained)), slope - law.B * by_rate


class _Knots:
    """A falling curve of so many steps, by how much its logarithm falls from knot to knot."""

    def __init__(self, steps: int, floor: float) -> None:
        self.floor = floor
        places = (1 - (1 - np.linspace(0, 1, min(steps, KNOTS))) ** 1.5) * (steps - 1)
        self.places = np.unique(places.round().astype(np.int64))
        step = np.arange(steps)
        self.low = np.clip(np.searchsorted(self.places, step, side="right") - 1, 0, max(len(self.places) - 2, 0))
        self.high = np.minimum(self.low + 1, len(self.places) - 1)
        width = np.maximum(self.places[self.high] - self.places[self.low], 1)
        self.part = (step - self.places[self.low]) / width

    def factors(self, falls: Array) -> tuple[Array, Array]:
        """The curve, and the part above the floor at the knots."""
        levels = np.exp(-np.concatenate([[0.0], np.cumsum(falls)])) * (1 - self.floor)
        knots = self.floor + levels
        return knots[self.low] * (1 - self.part) + knots[self.high] * self.part, levels

    def slope(self, levels: Array, by_factor: Array) -> Array:
        """From the derivative by each step's factor to that by each knot's fall."""
        many = len(self.places)
        by_level = np.bincount(self.low, by_factor * (1 - self.part), many)
        by_level += np.bincount(self.high, by_factor * self.part, many)
        return np.asarray(-np.cumsum((by_level * levels)[::-1])[::-1][1:])

    def falls(self, factors: Array) -> Array:
        """The nearest description of a curve."""
        levels = np.maximum((factors[self.places] - self.floor) / (1 - self.floor), 1e-3) if self.floor < 1 else None
        if levels is None:
            return np.zeros(len(self.places) - 1)
        return np.maximum(-np.diff(np.log(np.minimum.accumulate(levels))), 0)
