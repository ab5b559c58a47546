"""Emergence by loss ("Understanding Emergent Abilities of Language Models from the Loss Perspective").

    found = emergence(read_points(["out/small", "out/large"]))
    found.verdict, found.threshold, found.low, found.high

The paper: what a model can do depends on its pretraining loss and not on its size, and on some tasks it stays at chance
until the loss falls below a threshold. Here the right answers of every checkpoint are binomial draws, and four curves
of the loss are fitted to them by likelihood:

    threshold    chance + (slope * (threshold - loss))^power below the threshold, power 1 or 2; chance above it
    line         intercept + slope * loss
    bend         chance + exp(slope * (at - loss)), spread over all losses seen (slope at most 6 to their range)
    flat         chance

Emergence is said to be seen where the first beats each of the others by `MARGIN` of the Bayesian information criterion
(with the scatter beyond the binomial one taken out, so that checkpoints of a noisy task do not count for more than
they say). All parameters lie on grids that are refined around the best, so a fit needs no start and ends at the same
numbers every time, and a bootstrap is one matmul.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from moesaic.errors import UserError
from moesaic.train.law.loss_law import Array

MARGIN = 6.0  # of the criterion: odds of some twenty to one
SEED, DRAWS = 0, 400  # of the bootstrap
LEAST = 8  # checkpoints, below which nothing can be said
POWERS = (1.0, 2.0)  # of the rise below a threshold
STEEPEST = 6.0  # of a bend: one that rises by more than e^6 over the losses seen is a threshold with a round edge
PARAMETERS = {"threshold": 4, "bend": 3, "line": 2, "flat": 1}
SURE = 0.025  # left out of an interval at either end


@dataclass(frozen=True)
class Point:
    """A checkpoint: its pretraining loss, and the share of `count` answers that were right."""

    run: str
    step: int
    loss: float
    score: float
    count: int


@dataclass(frozen=True)
class RunFit:
    """The same curve, moved along the loss until it fits one run best."""

    run: str
    points: int
    lowest: float  # loss
    best: float  # score
    crossed: int | None  # the first step whose loss is below the threshold
    threshold: float | None  # where this run alone would put it
    gain: float  # of likelihood by that, in units of the criterion
    distance: float | None  # from the mean of the others' scores at its losses: what size changes beside the loss


@dataclass(frozen=True)
class Emergence:
    verdict: str  # threshold, or the simplest curve that says as much
    seen: bool
    threshold: float
    low: float
    high: float
    chance: float  # of the curve with a threshold, as the next
    slope: float
    power: float
    criteria: dict[str, float]  # of each curve, against the best; lower is better
    scatter: float  # beyond the binomial one, as a factor on the variance
    points: tuple[Point, ...]
    runs: tuple[RunFit, ...]
    warnings: tuple[str, ...] = ()
    suite: dict[str, Any] = field(default_factory=dict)

    def score(self, losses: Array) -> Array:
        """The score at these losses, by the curve with a threshold."""
        return _threshold(np.asarray(losses), np.array([[self.chance, self.slope, self.threshold, self.power]]))[0]

    def text(self) -> str:
        at = f"{self.threshold:.3f} ({self.low:.3f} to {self.high:.3f})"
        if self.seen:
            said = f"emergence: at chance ({self.chance:.1%}) until the loss falls below {at}"
            return f"{said}; 0.1 below it the score is {float(self.score(np.array([self.threshold - 0.1]))[0]):.1%}"
        lowest = min(point.loss for point in self.points)
        level = sum(point.score * point.count for point in self.points) / sum(point.count for point in self.points)
        words = {
            "flat": f"no emergence seen: the scores stay at {level:.1%} down to a loss of {lowest:.3f}",
            "line": "no emergence seen: the scores rise with the falling loss from the first checkpoint on",
            "bend": "no emergence seen: the scores rise ever faster, but leave chance at no loss in particular",
            "threshold": f"no emergence seen: a threshold at {at} fits best, but not by enough to rule out the others",
        }
        return words[self.verdict]


def emergence(points: Sequence[Point], chance: float | None = None, suite: dict[str, Any] | None = None) -> Emergence:
    """Fit all four. `chance` is the score of guessing, where it is known; else it is fitted too."""
    if len(points) < LEAST:
        problem = f"{len(points)} checkpoints have scores, too few for a curve"
        raise UserError("RUN", problem, f"At least {LEAST} are needed; lower train.keep_every and train.save_every.")
    losses = np.array([point.loss for point in points])
    right = np.array([point.score * point.count for point in points])
    counts = np.array([float(point.count) for point in points])
    if np.ptp(losses) <= 0:
        raise UserError("RUN", "all checkpoints have the same loss", "Evaluate earlier ones too.")
    ones = np.ones((len(points), 1))
    fits = {name: _search(name, losses, right, counts, ones, chance, refine=4) for name in PARAMETERS}
    free = {name: count - (chance is not None and name != "line") for name, count in PARAMETERS.items()}
    best_of_all = max(fits, key=lambda name: fits[name][1][0])
    scatter = _scatter(best_of_all, fits[best_of_all][0][0], losses, right, counts)
    criteria = {
        name: float(-2 * likelihood[0] / scatter + free[name] * np.log(len(points)))
        for name, (_, likelihood) in fits.items()
    }
    lowest = min(criteria.values())
    criteria = {name: value - lowest for name, value in criteria.items()}
    rivals = min(value for name, value in criteria.items() if name != "threshold")
    own = fits["threshold"][0][0]
    seen = criteria["threshold"] == 0 and rivals > MARGIN
    # Without emergence the simplest curve is named that is not clearly worse than the best.
    verdict = (
        "threshold" if seen else next(n for n in reversed(PARAMETERS) if criteria[n] <= MARGIN or criteria[n] == 0)
    )
    draws = _redrawn(points)
    drawn = _of_power("threshold", losses, right, counts, draws, chance, 0, float(own[3]), own)[0][:, 2]
    low, high = (float(value) for value in np.quantile(drawn, [SURE, 1 - SURE]))
    found = Emergence(
        verdict,
        seen,
        float(own[2]),
        min(low, float(own[2])),
        max(high, float(own[2])),
        float(own[0]),
        float(own[1]),
        float(own[3]),
        criteria,
        scatter,
        tuple(points),
        (),
        suite=dict(suite or {}),
    )
    found = replace(found, runs=tuple(_runs(found)))
    return replace(found, warnings=tuple(_warnings(found)))


def _runs(found: Emergence) -> list[RunFit]:
    fits = []
    for name in dict.fromkeys(point.run for point in found.points):
        mine = [point for point in found.points if point.run == name]
        below = [point.step for point in mine if point.loss < found.threshold]
        own, gain, distance = None, 0.0, None
        if found.verdict != "flat" and below and len(below) < len(mine):
            losses = np.array([point.loss for point in mine])
            shifts = np.linspace(-0.5, 0.5, 201) * np.ptp([point.loss for point in found.points])
            tried = np.array([[found.chance, found.slope, found.threshold + shift, found.power] for shift in shifts])
            counts = np.array([float(point.count) for point in mine])
            right = np.array([point.score for point in mine]) * counts
            likelihood = _likelihood(_threshold(losses, tried), right, counts).sum(-1)
            own = float(tried[likelihood.argmax(), 2])
            gain = 2 * float(likelihood.max() - likelihood[len(shifts) // 2]) / found.scatter
            distance = _distance(mine, [point for point in found.points if point.run != name])
        lowest, best = min(point.loss for point in mine), max(point.score for point in mine)
        fits.append(RunFit(name, len(mine), lowest, best, min(below) if below else None, own, gain, distance))
    return fits


def _distance(mine: Sequence[Point], others: Sequence[Point]) -> float | None:
    """How far a run's scores lie from the others' at the same losses, on average; where both have some."""
    if len(others) < 2:
        return None
    others = sorted(others, key=lambda point: point.loss)
    known = [point.loss for point in others]
    inside = [point for point in mine if known[0] <= point.loss <= known[-1]]
    if not inside:
        return None
    expected = np.interp([point.loss for point in inside], known, [point.score for point in others])
    return float(np.mean(np.array([point.score for point in inside]) - expected))


def _warnings(found: Emergence) -> list[str]:
    warnings = []
    if found.seen:
        above = sum(point.loss >= found.threshold for point in found.points)
        if min(above, len(found.points) - above) < 3:
            warnings.append("fewer than three checkpoints lie on one side of the threshold; keep more of them there")
    apart = [run.threshold for run in found.runs if run.threshold is not None]
    if len(apart) > 1 and sum(run.gain for run in found.runs) > len(apart) * np.log(len(found.points)) + MARGIN:
        warnings.append(
            f"the runs leave chance at losses that lie {np.ptp(apart):.3f} apart, more than chance explains: beside the"
            " loss something else counts (other data, another tokenizer, the architecture, or the size)"
        )
    if len({point.run for point in found.points}) == 1:
        warnings.append("one run alone cannot show that the loss decides, and not the step; give runs of other sizes")
    return warnings


# -- the curves: a row for each set of parameters, a column for each checkpoint


def _threshold(losses: Array, given: Array) -> Array:
    chance, slope, at, power = given.T[:, :, None]
    return np.asarray(np.minimum(chance + (slope * np.maximum(at - losses, 0)) ** power, 1))


def _line(losses: Array, given: Array) -> Array:
    start, slope = given.T[:2, :, None]
    return np.asarray(np.clip(start + slope * (losses.max() - losses), 0, 1))


def _bend(losses: Array, given: Array) -> Array:
    chance, slope, at = given.T[:, :, None]
    return np.asarray(np.minimum(chance + np.exp(np.minimum(slope * (at - losses), 0)), 1))


def _flat(losses: Array, given: Array) -> Array:
    return np.asarray(given[:, :1] + np.zeros_like(losses))


CURVES: dict[str, Callable[[Array, Array], Array]] = {
    "threshold": _threshold,
    "line": _line,
    "bend": _bend,
    "flat": _flat,
}


def _likelihood(expected: Array, right: Array, counts: Array) -> Array:
    """Logarithms, up to what no parameter changes. One in `count` may always be right, or wrong, by accident."""
    inside = np.clip(expected, 0.25 / counts, 1 - 0.25 / counts)
    return np.asarray(right * np.log(inside) + (counts - right) * np.log1p(-inside))


def _search(
    name: str, losses: Array, right: Array, counts: Array, weights_PB: Array, chance: float | None, refine: int
) -> tuple[Array, Array]:
    """The best parameters for each column of weights, and their likelihoods."""
    powers = POWERS if name == "threshold" else (1.0,)
    tried = [_of_power(name, losses, right, counts, weights_PB, chance, refine, power) for power in powers]
    best = np.stack([likelihood_B for _, likelihood_B in tried]).argmax(0)
    every = np.arange(weights_PB.shape[1])
    given_BX, likelihood_B = (np.stack(found)[best, every] for found in zip(*tried, strict=True))
    return given_BX, likelihood_B


def _of_power(
    name: str,
    losses: Array,
    right: Array,
    counts: Array,
    weights_PB: Array,
    chance: float | None,
    refine: int,
    power: float,
    near: Array | None = None,
) -> tuple[Array, Array]:
    """The same for one power; `near` a fit that is there already, if only its place is in question."""
    low, high, spread = losses.min(), losses.max(), np.ptp(losses)
    scores = right / counts
    guesses = np.linspace(0, min(1.0, float(scores.max())), 13)
    slopes = np.geomspace(0.1, 100, 16) / spread
    places = np.linspace(low, high, 61)
    if near is not None:
        guesses = np.clip(near[0] + np.linspace(-0.06, 0.06, 13), 0, 1)
    axes: dict[str, list[Array]] = {
        "threshold": [guesses, slopes * max(float(np.ptp(scores)), 0.02), places, np.array([power])],
        "line": [guesses, np.linspace(0, 2 / spread, 41)],
        "bend": [guesses, np.geomspace(0.1, STEEPEST, 16) / spread, np.linspace(low - 2 * spread, low + spread, 46)],
        "flat": [np.linspace(0, 1, 401)],
    }
    grid = axes[name]
    if near is not None:
        grid[1] = near[1] * np.geomspace(0.4, 2.5, 16)
    known = chance is not None and name != "line"
    if known:
        grid[0] = np.array([chance])
    while True:
        given = np.stack([axis.ravel() for axis in np.meshgrid(*grid, indexing="ij")], axis=-1)
        likelihood_GB = _likelihood(CURVES[name](losses, given), right, counts) @ weights_PB
        best = likelihood_GB.argmax(0)
        if not refine:
            return given[best], likelihood_GB[best, np.arange(weights_PB.shape[1])]
        refine -= 1
        centre = given[best[0]]
        for number, axis in enumerate(grid):
            if len(axis) > 1:
                at = int(np.abs(axis - centre[number]).argmin())
                grid[number] = np.linspace(axis[max(at - 1, 0)], axis[min(at + 1, len(axis) - 1)], len(axis))


def _scatter(name: str, given: Array, losses: Array, right: Array, counts: Array) -> float:
    expected = np.clip(CURVES[name](losses, given[None])[0], 0.25 / counts, 1 - 0.25 / counts)
    chi = (right - counts * expected) ** 2 / (counts * expected * (1 - expected))
    # A single checkpoint far off must not hide that all others lie on the curve.
    chi = np.minimum(chi, 9.0)
    return float(max(1.0, chi.sum() / max(len(losses) - PARAMETERS[name], 1)))


def _redrawn(points: Sequence[Point]) -> Array:
    """How often each checkpoint is drawn, a column for each draw: within its run, so that every size stays."""
    chance = np.random.default_rng(SEED)
    draws_PB = np.zeros((len(points), DRAWS))
    runs = np.array([point.run for point in points])
    for name in np.unique(runs):
        mine = np.flatnonzero(runs == name)
        draws_PB[mine] = chance.multinomial(len(mine), np.full(len(mine), 1 / len(mine)), DRAWS).T
    return draws_PB
