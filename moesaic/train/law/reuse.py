"""Fit what repeated data is worth to pilots with different unique tokens N and epochs K (data/reuse.py has the law).

    fitted = fit_reuse(read_pilots(["out/p1", "out/p2", ...]))
    fitted.law.effective(8, tokens=10**8), fitted.law.useful(10**8)

A pilot is a finished run with `data.unique_tokens` and a held-out loss (the training loss of repeated text is that of
text it knows). Its loss is taken to be that of one pass over N E(K, N) tokens,

    loss = L0 + A (N E(K, N))^-alpha

and all constants are fitted together, by least squares of relative errors: L0 and A enter linearly, alpha is searched
along a grid, and the two constants of E for each form of it. The form is the one with the least error. Beside it stand
the errors of two simpler laws: repeated data is as good as fresh (E = K), and its worth does not depend on N (b = 0,
as in the borrowed curve within a narrow range of sizes).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from scipy.optimize import minimize

from moesaic.data.reuse import BORROWED, ReuseLaw
from moesaic.data.shards import MANIFEST
from moesaic.data.stream import TokenStream
from moesaic.errors import UserError
from moesaic.model import lineage
from moesaic.recipe import Recipe
from moesaic.strict import validate
from moesaic.train.law.loss_law import Array, write_json
from moesaic.train.law.runs import HELD_OUT
from moesaic.train.report.metrics import read_metrics

ALPHAS = np.geomspace(0.05, 2.0, 80)
LEAST = 6  # pilots: there are five constants


@dataclass(frozen=True)
class Pilot:
    run: str
    tokens: int  # unique ones
    epochs: float
    loss: float  # held out, at its end


@dataclass(frozen=True)
class OnePass:
    """The loss after one pass over so many fresh tokens."""

    L0: float
    A: float
    alpha: float
    error: float  # of the pilots' losses, relative, root of the mean square

    def loss(self, tokens: float) -> float:
        return float(self.L0 + self.A * tokens**-self.alpha)


@dataclass(frozen=True)
class FittedReuse:
    law: ReuseLaw
    once: OnePass
    error: float
    others: dict[str, float]  # errors of simpler laws, and of the other forms
    pilots: tuple[Pilot, ...]
    plateaus: dict[int, tuple[float, float, float]]  # by N: R, and the least and most of it with a pilot left out
    warnings: tuple[str, ...] = ()

    def loss(self, tokens: float, epochs: float) -> float:
        return self.once.loss(tokens * self.law.effective(epochs, tokens))

    def save(self, path: str | Path) -> None:
        facts = asdict(self)
        del facts["law"]
        write_json(path, self.law.content(**facts))

    def plan(self, tokens: int, epochs: float) -> dict[str, float]:
        """What so many epochs of so many tokens are worth."""
        law = self.law
        effective = law.effective(epochs, tokens)
        return {
            "tokens": tokens,
            "epochs": epochs,
            "effective_epochs": effective,
            "effective_tokens": effective * tokens,
            "marginal": law.marginal(epochs, tokens),
            "useful_epochs": law.useful(tokens),
            "loss": self.loss(tokens, epochs),
        }


def fit_reuse(pilots: Sequence[Pilot]) -> FittedReuse:
    _check(pilots)
    found = {
        (growth, shape): _best(pilots, growth, shape)
        for growth, shape in itertools.product(("log", "power"), ("sum", "exponential"))
    }
    (growth, shape), (law, once) = min(found.items(), key=lambda entry: entry[1][1].error)
    others = {f"{other[0]}, {other[1]}": found[other][1].error for other in found if other != (growth, shape)}
    others["E = K"] = fit_one_pass(pilots, ReuseLaw(1e9, 0.0)).error
    others["E without N"] = min(_best(pilots, growth, each, level=True)[1].error for each in ("sum", "exponential"))
    others["borrowed"] = fit_one_pass(pilots, BORROWED).error
    left_out = [
        _best([*pilots[:number], *pilots[number + 1 :]], growth, shape, law)[0]
        for number in range(len(pilots) if len(pilots) > LEAST else 0)
    ]
    plateaus = {}
    for tokens in sorted({pilot.tokens for pilot in pilots}):
        every = [law.plateau(tokens), *(other.plateau(tokens) for other in left_out)]
        plateaus[tokens] = (every[0], min(every), max(every))
    fitted = FittedReuse(law, once, once.error, others, tuple(pilots), plateaus)
    return FittedReuse(**{**vars(fitted), "warnings": tuple(_warnings(fitted))})


def _best(
    pilots: Sequence[Pilot], growth: str, shape: str, near: ReuseLaw | None = None, level: bool = False
) -> tuple[ReuseLaw, OnePass]:
    """The law of one form with the least error; `level` holds b at zero, `near` is where to start, else a grid is."""
    sizes = np.log([pilot.tokens for pilot in pilots])
    middle, span = float(sizes.mean()), max(float(np.ptp(sizes)), 1e-9)

    def law(x: Array) -> ReuseLaw:
        """x: the logarithm of R in the middle, and how much R (log) or its logarithm (power) grows along the sizes."""
        rise = 0.0 if level else float(x[1])
        if growth == "power":
            return ReuseLaw(float(x[0]) - rise / span * middle, rise / span, "power", shape)  # type: ignore[arg-type]
        slope = rise * float(np.exp(x[0])) / span
        return ReuseLaw(float(np.exp(x[0])) - slope * middle, slope, "log", shape)  # type: ignore[arg-type]

    def error(x: Array) -> float:
        if abs(x[0]) > 8 or abs(x[1]) > 6:
            return 1e3
        return fit_one_pass(pilots, law(x)).error

    if near is None:
        starts = [np.array(x) for x in itertools.product(np.linspace(-1.5, 4, 12), (0.0, 0.7, 1.4))]
    else:
        level_near = near.plateau(np.exp(middle))
        rise = near.b * span if growth == "power" else near.b * span / level_near
        starts = [np.array([np.log(level_near), rise])]
    start = min(starts, key=error)
    steps = np.array([start, start + [0.4, 0.0], start + [0.0, 0.4]])
    options = {"initial_simplex": steps, "xatol": 1e-3, "fatol": 1e-9, "maxiter": 150}
    x = cast(Array, minimize(error, start, method="Nelder-Mead", options=options).x)
    return law(x), fit_one_pass(pilots, law(x))


def fit_one_pass(pilots: Sequence[Pilot], law: ReuseLaw) -> OnePass:
    """The one-pass curve that fits best if repeated data is worth what the law says."""
    worth_P = np.array([pilot.tokens * law.effective(pilot.epochs, pilot.tokens) for pilot in pilots])
    unit = float(worth_P.mean())
    level_P = 1 / np.array([pilot.loss for pilot in pilots])  # columns of errors relative to the losses
    power_AP = (worth_P / unit) ** -ALPHAS[:, None] * level_P
    ll, lp_A, pp_A = level_P @ level_P, power_AP @ level_P, (power_AP**2).sum(-1)
    l1, p1_A = level_P.sum(), power_AP.sum(-1)
    apart_A = np.maximum(ll * pp_A - lp_A**2, 1e-300)
    L0_A, A_A = (l1 * pp_A - p1_A * lp_A) / apart_A, (ll * p1_A - l1 * lp_A) / apart_A
    # Neither may be below zero: then the other is alone.
    L0_A, A_A = np.where(A_A < 0, l1 / ll, L0_A), np.maximum(A_A, 0)
    L0_A, A_A = np.maximum(L0_A, 0), np.where(L0_A < 0, p1_A / pp_A, A_A)
    error_A = np.sqrt(((L0_A[:, None] * level_P + A_A[:, None] * power_AP - 1) ** 2).mean(-1))
    best = int(error_A.argmin())
    alpha = float(ALPHAS[best])
    return OnePass(float(L0_A[best]), float(A_A[best]) * unit**alpha, alpha, float(error_A[best]))


def _check(pilots: Sequence[Pilot]) -> None:
    if len(pilots) < LEAST:
        raise UserError("RUN", f"{len(pilots)} pilots given, and the law has five constants", f"Give {LEAST} or more.")
    once = {pilot.tokens for pilot in pilots if pilot.epochs <= 1.05}
    again = {pilot.tokens for pilot in pilots if pilot.epochs > 1.5}
    if len(once) < 2:
        problem = f"{len(once)} of the pilots' sizes {'was' if len(once) == 1 else 'were'} trained on for one epoch"
        raise UserError("RUN", problem, "Add pilots of one epoch with two or more data.unique_tokens.")
    if len(again) < 2:
        problem = f"{len(again)} of the pilots' sizes {'was' if len(again) == 1 else 'were'} repeated"
        raise UserError("RUN", problem, "Add pilots of several epochs with two or more data.unique_tokens.")


def _warnings(fitted: FittedReuse) -> list[str]:
    warnings = []
    fresh = max(pilot.tokens for pilot in fitted.pilots if pilot.epochs <= 1.05)
    worth = max(pilot.tokens * fitted.law.effective(pilot.epochs, pilot.tokens) for pilot in fitted.pilots)
    if worth > 1.5 * fresh:
        warnings.append(
            f"pilots of one epoch end at {fresh:,} tokens, and repeated ones are worth up to {worth:,.0f}:"
            " add a longer pilot of one epoch"
        )
    if fitted.law.b < 0:
        warnings.append(
            "the fit has larger data repeated less, against the theory: the pilots are too few or too noisy"
        )
    if fitted.others["E = K"] < 1.1 * fitted.error:
        warnings.append("fresh and repeated data did equally well: give pilots of more epochs to see where it ends")
    if fitted.others["E without N"] < 1.1 * fitted.error:
        warnings.append("the worth does not depend on N as far as these pilots show: give a wider range of sizes")
    return warnings


def read_pilots(runs: Sequence[str | Path]) -> list[Pilot]:
    return [read_pilot(run) for run in dict.fromkeys(map(Path, runs))]


def read_pilot(run: Path) -> Pilot:
    """Unique tokens and epochs as the run's own plan has them, and its last held-out loss."""
    lines = [line for line in read_metrics(run) if isinstance(line.get(HELD_OUT), int | float)]
    if not lines:
        raise UserError(run, f"has no {HELD_OUT}", "Train with data.held_out and train.evaluate_every.")
    stages = [stage["recipe"] for stage in lineage.read(run) if isinstance(stage.get("recipe"), dict)]
    if not stages:
        raise UserError(run, "has no recipe in its lineage", "Give the directory of a finished run.")
    values: dict[str, Any] = stages[-1]
    recipe = validate(Recipe, values, lambda path: str(run))
    if lines[-1]["step"] < recipe.train.steps:
        problem = f"was last evaluated at step {lines[-1]['step']:,} of {recipe.train.steps:,}"
        raise UserError(run, problem, "Resume it.")
    data = Path(recipe.train.data) if recipe.train.data else run / "data"
    if not (data / MANIFEST).exists():
        raise UserError(data, f"the data of {run} is not there", "Its size and epochs are read from it; put it back.")
    usage = TokenStream.open(data, recipe).plan.usage
    tokens = sum(use.tokens for use in usage)
    return Pilot(str(run), tokens, sum(use.drawn for use in usage) / tokens, float(lines[-1][HELD_OUT]))
