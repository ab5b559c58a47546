"""Fit the loss law to two or more runs with different schedules.

    fitted = fit([read_run("out/constant"), read_run("out/cosine")])
    fitted.law, fitted.scores, fitted.warnings

What is made small is the Huber loss of log(predicted) - log(true) at some hundred steps of each run, in units of the
noise. The true loss is a mean over a window, which takes most of the noise of single batches out. L0, A and B enter the
law linearly, so that a coarse grid over the other four constants, with the best three for each, gives the points that
the search starts from. Nothing is random: the same runs give the same law.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from scipy.optimize import minimize, nnls

from moesaic.errors import UserError
from moesaic.train.law.loss_law import SMALLEST, Array, LossLaw, Steps, changed
from moesaic.train.law.runs import LOSS, LossCurve, smooth

# A loss that still falls from that of random weights follows no power law, and would bend the fit of the rest.
SKIP = 0.1
POINTS = 100  # steps of each run that are fitted
BLOCKS = 500  # a longer run is fitted as this many stretches of equal rate
MISFIT = 1e-3  # by how much the law may be wrong, beside the noise; relative
# Where the search starts, with learning rates in units of the peak.
STARTS = 6
ALPHAS = (0.1, 0.2, 0.35, 0.6, 1.0)
SPEEDS = (0.001, 0.01, 0.1)
BETAS = (0.3, 0.6, 1.2)
GAMMAS = (0.3, 0.6)
# A run that decays once and a constant one leave a valley of B, C, beta and gamma that fit both equally well, but not
# what a faster decay would gain. So that the search does not end far out in it, these are held loosely near what the
# paper's authors publish for models of 25, 100 and 400 million parameters (C 2.03 to 2.13, beta 0.58 to 0.60, gamma
# 0.64 to 0.66 at a peak of 3e-4; here in units of the peak): B as a share of the loss, and C, beta, gamma, each with
# the spread of its logarithm.
USUAL = (0.05, 0.115, 0.59, 0.64)
FREEDOM = np.array([1.5, 0.7, 0.3, 0.2])


@dataclass(frozen=True)
class Score:
    """How well a law fits a run's curve, smoothed over `window` steps and after the first `skipped`."""

    run: str
    steps: int
    warmup: int
    peak: float
    window: int
    skipped: int
    r2: float
    mean_error: float  # relative
    max_error: float
    final: float  # the mean of the last window
    predicted_final: float
    final_error: float


@dataclass(frozen=True)
class Fit:
    law: LossLaw
    scores: tuple[Score, ...]
    warnings: tuple[str, ...]
    seconds: float
    key: str = LOSS  # which loss of the runs' lines it is the law of

    def save(self, path: str | Path) -> None:
        """Write the law with what it was fitted on, from which predictions take their defaults."""
        self.law.save(
            path,
            peak=max(score.peak for score in self.scores),
            peaks=[score.peak for score in self.scores],
            steps=max(score.steps for score in self.scores),
            warmup=min(score.warmup for score in self.scores),
            loss=self.key,
            scores=[asdict(score) for score in self.scores],
            warnings=list(self.warnings),
        )


def fit(runs: Sequence[LossCurve], window: int | None = None, skip: float = SKIP) -> Fit:
    """The law that fits these runs best. `skip` is the share of the steps after warm-up that is left out at the start,
    and `window` the number of steps that losses are averaged over."""
    began = time.perf_counter()
    warnings = _check(runs)
    unit = max(run.peak for run in runs)
    samples = [_Sample(run, unit, _window(run, window), int(skip * len(run.rates))) for run in runs]
    decays = any(len(sample.decrease) for sample in samples)
    found = [_descend(start, samples, decays) for start in _starts(samples, decays)]
    _, best = min(found, key=lambda result: result[0])
    law = _in_true_units(best, unit, decays)
    scores = tuple(score(law, run, window, skip) for run in runs)
    for result in scores:
        if result.r2 < 0.95:
            warnings.append(f"{result.run}: the law explains only {result.r2:.1%} of the smoothed curve's variance")
    if law.L0 < 0.01 * min(result.final for result in scores):
        warnings.append(
            "the losses show no sign of levelling off, so the fit is uncertain; raise --skip, or train longer"
        )
    return Fit(law, scores, tuple(warnings), time.perf_counter() - began, runs[0].key)


def score(
    law: LossLaw, run: LossCurve, window: int | None = None, skip: float = SKIP, predicted: Array | None = None
) -> Score:
    """Compare the law, or what it `predicted` for another schedule, with a run; it need not be one it was fitted on."""
    window = _window(run, window)
    skipped = int(skip * len(run.rates))
    predicted = law.predict(run.rates, run.warmup_sum) if predicted is None else predicted
    measured = np.isfinite(run.losses)
    # Near the end a centred window has only a few steps left, and would be noise.
    inside = slice(skipped, len(run.rates) - window // 2)
    true = smooth(run.losses, window)[inside]
    there = np.isfinite(true)
    true, predictions = true[there], smooth(np.where(measured, predicted, np.nan), window)[inside][there]
    errors = np.abs(predictions / true - 1)
    last = len(run.losses) - 1 - int(measured[::-1].argmax())  # what was last measured, if not every step was
    end = slice(max(0, last + 1 - window), last + 1)
    final, predicted_final = float(np.nanmean(run.losses[end])), float(predicted[end][measured[end]].mean())
    return Score(
        run=run.name,
        steps=len(run.rates) + run.warmup,
        warmup=run.warmup,
        peak=run.peak,
        window=window,
        skipped=skipped,
        r2=float(1 - ((predictions - true) ** 2).sum() / ((true - true.mean()) ** 2).sum()),
        mean_error=float(errors.mean()),
        max_error=float(errors.max()),
        final=final,
        predicted_final=predicted_final,
        final_error=predicted_final / final - 1,
    )


def _window(run: LossCurve, window: int | None) -> int:
    if window is not None and not 1 <= window <= len(run.losses) // 4:
        raise UserError("--window", f"must be from 1 to a quarter of the steps of {run.name}, found {window}")
    return window or run.window


class _Sample:
    """The steps of one run that are fitted, with all that does not depend on the constants computed beforehand.

    Learning rates are in units of the greatest of all runs: a sum of them is then a number of steps at the peak.
    """

    def __init__(self, run: LossCurve, unit: float, window: int, skipped: int) -> None:
        means = smooth(run.losses, window)
        at = _steps_to_fit(np.flatnonzero(np.isfinite(means)), len(run.losses), window, skipped)
        self.losses = means[at]
        # What is left of a curve in its second differences is noise, whose variance they have six times.
        logs = np.log(run.losses[np.isfinite(run.losses)])
        noise = np.sqrt(np.mean(np.diff(logs, 2) ** 2) / 6 / window)
        self.spread = float(np.hypot(noise, MISFIT))  # how far a mean may be from the law
        self.worth = np.isfinite(run.losses).sum() / window  # how many means there are that share no step

        sums = np.cumsum(run.rates / unit)
        self.end = float(sums[-1])
        # The early curve bends within a window, so the power is averaged over it too.
        half = np.minimum(window // 2, at)
        around = (at[:, None] + np.linspace(-1, 1, 5) * half[:, None]).round().astype(np.int64)
        self.sums = sums[around] + run.warmup_sum / unit
        rates, ends = _blocks(run.rates / unit)
        changes = changed(rates)
        self.decrease = rates[changes - 1] - rates[changes]
        self.log_rate = np.log(np.maximum(rates[changes], SMALLEST))
        # Nothing where the change is still to come.
        self.since = np.maximum(sums[at, None] - sums[ends[changes - 1]], 0)

    def power(self, alpha: float) -> tuple[Array, Array]:
        """The power part for A = 1, and its derivative by alpha."""
        power = self.sums**-alpha
        return power.mean(axis=1), -(power * np.log(self.sums)).mean(axis=1)

    def drop(self, C: float, beta: float, gamma: float) -> tuple[Array, Array, Array, Array]:
        """The decreases' part for B = 1, and its derivatives by C, beta and gamma."""
        x = self.since * np.exp(-gamma * self.log_rate)
        y = C * x
        y += 1
        log_y = np.log(y)
        power = np.exp(-beta * log_y)
        x *= power
        x /= y
        log_y *= power
        return (
            self.decrease.sum() - power @ self.decrease,
            beta * (x @ self.decrease),
            log_y @ self.decrease,
            -C * beta * (x @ (self.decrease * self.log_rate)),
        )


def _steps_to_fit(known: Steps, steps: int, window: int, skipped: int) -> Steps:
    """Half of them evenly and half ever more widely spaced, up to where the last whole window is centred; of the steps
    whose loss is known."""
    last = steps - 1 - window // 2
    even = np.linspace(skipped, last, POINTS // 2)
    early = np.geomspace(skipped + 1, last + 1, POINTS // 2) - 1
    known = known[(known >= skipped) & (known <= last)]
    wanted = np.concatenate([even, early]).round()
    return known[np.unique(np.searchsorted(known, wanted).clip(0, len(known) - 1))]


def _blocks(rates: Array) -> tuple[Array, Steps]:
    """The curve as some hundred segments that start at every jump: the mean rate and the last step of each."""
    jumps = np.flatnonzero(np.abs(np.diff(rates)) > 0.01 * rates.max()) + 1
    edges = np.linspace(0, len(rates), min(len(rates), BLOCKS) + 1).round().astype(np.int64)
    edges = np.union1d(edges, jumps)
    return np.add.reduceat(rates, edges[:-1]) / np.diff(edges), edges[1:] - 1


def _starts(samples: list[_Sample], decays: bool) -> list[Array]:
    """The best constants of a coarse grid."""
    lowest = min(float(sample.losses.min()) for sample in samples)
    true = np.concatenate([sample.losses for sample in samples])
    powers = {alpha: np.concatenate([sample.power(alpha)[0] for sample in samples]) for alpha in ALPHAS}
    ranked = []
    for C, beta, gamma in itertools.product(SPEEDS, BETAS, GAMMAS) if decays else [USUAL[1:]]:
        drop = np.concatenate([sample.drop(C, beta, gamma)[0] for sample in samples])
        for alpha, power in powers.items():
            # Divided by the loss, because relative errors are what counts.
            columns = np.stack([np.ones_like(true), power, -drop], axis=1) / true[:, None]
            (L0, A, B), residual = nnls(columns, np.ones_like(true))
            # One that gave a part no weight at all would be far away in logarithms.
            start = max(L0, 0.05 * lowest), max(A, 1e-3 * lowest), alpha, max(B, 1e-3 * lowest), C, beta, gamma
            ranked.append((residual, start))
    ranked.sort()
    return [np.array(constants) for _, constants in ranked[:STARTS]]


def _descend(start: Array, samples: list[_Sample], decays: bool) -> tuple[float, Array]:
    """The nearest best constants: their loss, and they themselves."""
    lowest = min(float(sample.losses.min()) for sample in samples)
    low = np.array([1e-3 * lowest, 1e-6 * lowest, 0.02, 1e-6 * lowest, 1e-6, 0.05, 0.05])
    high = np.array([lowest, 1e4 * lowest, 3.0, 1e2 * lowest, 1e1, 5.0, 1.0])
    usual = np.log([USUAL[0] * lowest, *USUAL[1:]])

    def loss(logs: Array) -> tuple[float, Array]:
        L0, A, alpha, B, C, beta, gamma = constants = np.exp(logs)
        away = (logs[3:] - usual) / FREEDOM
        total, slope = float(away @ away) / 2, np.concatenate([np.zeros(3), away / FREEDOM])
        for sample in samples:
            power, by_alpha = sample.power(alpha)
            predictions = L0 + A * power
            by = [np.ones_like(power), power, A * by_alpha]
            if decays:
                drop, by_C, by_beta, by_gamma = sample.drop(C, beta, gamma)
                predictions = predictions - B * drop
                by += [-drop, -B * by_C, -B * by_beta, -B * by_gamma]
            predictions = np.maximum(predictions, 1e-3 * lowest)  # a start far off may predict less than nothing
            residual = np.log(predictions / sample.losses) / sample.spread
            inner = np.clip(residual, -1, 1)
            weight = sample.worth / len(predictions)
            total += weight * float(inner @ (residual - inner / 2))
            pull = inner * (weight / sample.spread) / predictions
            slope[: len(by)] += np.array([derivative @ pull for derivative in by]) * constants[: len(by)]
        return total, slope

    result = minimize(
        loss,
        np.clip(np.log(start), np.log(low), np.log(high)),
        jac=True,
        bounds=list(zip(np.log(low), np.log(high))),
        method="L-BFGS-B",
        options={"maxiter": 500, "maxfun": 700, "ftol": 1e-10, "gtol": 1e-5, "maxcor": 20},
    )
    return float(result.fun), np.exp(result.x)


def _in_true_units(constants: Array, unit: float, decays: bool) -> LossLaw:
    """The fit measures learning rates in units of the greatest; the law is for rates as they are."""
    L0, A, alpha, B, C, beta, gamma = map(float, constants)
    return LossLaw(L0, A * unit**alpha, alpha, B / unit if decays else 0.0, C * unit ** (gamma - 1), beta, gamma)


def _check(runs: Sequence[LossCurve]) -> list[str]:
    if len(runs) < 2:
        raise UserError("RUN", f"{len(runs)} given; a law needs two or more runs with different schedules")
    for one, other in itertools.combinations(runs, 2):
        if one.recipe is not None and other.recipe is not None:
            ours, theirs = one.recipe.get("model"), other.recipe.get("model")
            if isinstance(ours, dict) and isinstance(theirs, dict) and ours != theirs:
                key = next(key for key in {**ours, **theirs} if ours.get(key) != theirs.get(key))
                problem = f"not the model of {one.name}: its {key} is {theirs.get(key)}, not {ours.get(key)}"
                raise UserError(other.name, problem, "A law holds for one model.")
    warnings = []
    if not any(len(changed(run.rates)) for run in runs):
        warnings.append(
            "no run changes its learning rate, so that what a decay gains is taken as nothing; add a run that decays"
        )
    elif all(_alike(runs[0], run) for run in runs[1:]):
        warnings.append("the runs' schedules are nearly the same, so the law is a guess; add one of another shape")
    elif max(1 - run.rates.min() / run.rates.max() for run in runs) < 0.3:
        warnings.append("no run's learning rate falls by a third, so the gain of a deeper decay is a guess")
    batches = {recipe.get("train", {}).get("batch_tokens") for run in runs if (recipe := run.recipe)} - {None}
    if len(batches) > 1:
        warnings.append(
            f"the runs' batches differ ({', '.join(map(str, sorted(batches)))} tokens); a law holds for one"
        )
    return warnings


def _alike(one: LossCurve, other: LossCurve) -> bool:
    """Whether two schedules are one shape, up to a twentieth of the peak."""
    place = np.linspace(0, 1, 200)
    shapes = [np.interp(place, np.linspace(0, 1, len(run.rates)), run.rates) for run in (one, other)]
    same_length = abs(len(one.rates) / len(other.rates) - 1) < 0.05
    return same_length and float(np.abs(shapes[0] - shapes[1]).max()) < 0.05 * max(one.peak, other.peak)
