"""What `moesaic law predict` and `moesaic law optimize` do: from a law file and options to curves.

Defaults of a schedule (peak, warmup) are those of the runs that the law was fitted on. A schedule far from those runs
gets a warning, because the law was never tested there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moesaic.errors import UserError
from moesaic.methods import Method, build
from moesaic.train.law import optimize as search
from moesaic.train.law.fit import SKIP, Score, score
from moesaic.train.law.loss_law import Array, load_law, write_json
from moesaic.train.law.optimize import Optimized
from moesaic.train.law.runs import LOSS, LossCurve, default_window, read_run
from moesaic.train.schedules import Schedule, curve
from moesaic.yaml_reader import read_yaml


@dataclass(frozen=True)
class Predicted:
    """A predicted curve, and how it compares with a run's."""

    title: str
    rates: Array  # of every step, warm-up included
    warmup: int
    losses: Array  # after warm-up
    warnings: tuple[str, ...]
    run: LossCurve | None = None
    score: Score | None = None

    @property
    def final(self) -> float:
        return float(self.losses[-1])

    def report(self) -> dict[str, Any]:
        """The prediction in a few values, without the curve itself."""
        return {
            "schedule": self.title,
            "steps": len(self.rates),
            "warmup": self.warmup,
            "peak": float(self.rates.max()),
            "final": self.final,
            "score": self.score,
            "warnings": self.warnings,
        }

    def save(self, path: str | Path) -> None:
        """The curve as JSON: for each step after warm-up its number, learning rate and predicted loss."""
        steps = range(self.warmup, len(self.rates))
        content = {
            "format": 1,
            "schedule": self.title,
            "warmup": self.warmup,
            "step": list(steps),
            "lr": self.rates[self.warmup :].tolist(),
            "loss": self.losses.tolist(),
        }
        if self.run is not None:
            content["true_loss"] = [float(loss) if np.isfinite(loss) else None for loss in self.run.losses]
        write_json(path, content)

    def draw(self, path: str | Path) -> None:
        from moesaic.train.law.plot import draw

        window = self.score.window if self.score else default_window(len(self.losses))
        draw(path, f"Loss curve: {self.title}", self.rates, self.losses, self.run, window)


def predict(
    law_file: str | Path,
    schedule: str | None,
    options: Sequence[str] = (),
    steps: int | None = None,
    peak: float | None = None,
    warmup: int | None = None,
    run: str | Path | None = None,
    window: int | None = None,
    skip: float = SKIP,
) -> Predicted:
    """The curve of a named schedule, or of a run's own; beside a run, steps, peak and warm-up are the run's."""
    law, facts = load_law(law_file)
    true = read_run(run, facts.get("loss", LOSS)) if run is not None else None
    if schedule is None:
        if true is None:
            raise UserError("--schedule", "missing", "Name a schedule, or a run with --run.")
        for name, given in (("--steps", steps), ("--peak", peak), ("--warmup", warmup), ("KEY=VALUE", options or None)):
            if given is not None:
                raise UserError(name, "goes with --schedule; the run has its own")
        losses = law.predict(true.rates, true.warmup_sum)
        rates = np.concatenate([_rise(true), true.rates])
        warnings = _unlike(facts, len(rates), true.peak)
        return Predicted(true.name, rates, true.warmup, losses, warnings, true, score(law, true, window, skip))

    method = build(Method(schedule, _options(options)), Schedule, "--schedule")
    if true is not None:
        steps = steps or len(true.rates) + true.warmup
        peak = peak or true.peak
        warmup = true.warmup if warmup is None else warmup
    if steps is None:
        raise UserError("--steps", "missing", "Say how many steps the run would have.")
    peak, warmup = _peak(facts, peak, law_file), _warmup(facts, warmup, steps)
    rates = curve(method, steps, warmup, peak)
    _started(rates, warmup)
    losses = law.predict(rates[warmup:], float(rates[:warmup].sum()))
    title = " ".join([schedule, *options])
    warnings = _unlike(facts, steps, peak)
    if true is None:
        return Predicted(title, rates, warmup, losses, warnings)
    if len(losses) != len(true.losses):
        problem = f"has {len(true.losses):,} steps after warm-up, and the prediction {len(losses):,}"
        raise UserError(true.name, problem, "Leave --steps and --warmup out to take the run's.")
    if float(np.abs(rates[warmup:] - true.rates).max()) > 0.02 * true.peak:
        warnings = (*warnings, f"{true.name} was trained with other learning rates than these")
    compared = score(law, true, window, skip, losses)
    return Predicted(title, rates, warmup, losses, warnings, true, compared)


def optimize(
    law_file: str | Path,
    steps: int,
    peak: float | None = None,
    warmup: int | None = None,
    floor: float = 0.0,
) -> tuple[Optimized, tuple[str, ...]]:
    """The best schedule under the law of a file, and warnings about the prediction."""
    law, facts = load_law(law_file)
    peak = _peak(facts, peak, law_file)
    best = search.optimize(law, steps, peak, _warmup(facts, warmup, steps), floor)
    warnings = _unlike(facts, steps, peak)
    if law.B == 0:
        warnings = (*warnings, "the law has no gain from decay (B = 0), so its best schedule is a constant rate")
    return best, warnings


def _options(texts: Sequence[str]) -> dict[str, Any]:
    options = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            raise UserError("command line", f'"{text}" is not of the form key=value')
        options[name.strip()] = read_yaml(value, f"command line: {name.strip()}")
    return options


def _rise(run: LossCurve) -> Array:
    """A run's warm-up, of which only the sum was kept."""
    rise = np.arange(1, run.warmup + 1, dtype=np.float64)
    return rise * (run.warmup_sum / rise.sum()) if run.warmup else rise


def _peak(facts: dict[str, Any], peak: float | None, law_file: str | Path) -> float:
    peak = facts.get("peak") if peak is None else peak
    if peak is None:
        raise UserError("--peak", f"missing, and {law_file} does not say which its runs had")
    if not isinstance(peak, int | float) or not np.isfinite(peak) or not peak > 0:
        raise UserError("--peak", f"must be a number above 0, found {peak}")
    return float(peak)


def _warmup(facts: dict[str, Any], warmup: int | None, steps: int) -> int:
    if warmup is None:
        usual, longest = facts.get("warmup"), facts.get("steps")
        warmup = usual if isinstance(usual, int) else 0
        # A shorter run than those fitted does not inherit a warm-up that would fill it.
        if not isinstance(longest, int) or steps < longest:
            warmup = min(warmup, steps // 10)
    if warmup >= steps:
        raise UserError("--warmup", f"must be below the number of steps, {steps:,}; found {warmup:,}")
    return warmup


def _started(rates: Array, warmup: int) -> None:
    if not rates[warmup] > 0:
        raise UserError("--schedule", "begins at a learning rate of zero, which the law cannot describe")


def _unlike(facts: dict[str, Any], steps: int, peak: float) -> tuple[str, ...]:
    """What is far from the runs that the law was fitted on."""
    warnings = [f"of the fit: {text}" for text in facts.get("warnings", [])]
    peaks, longest = facts.get("peaks"), facts.get("steps")
    if isinstance(peaks, list) and peaks and not 0.8 * min(peaks) <= peak <= 1.25 * max(peaks):
        known = " and ".join(f"{value:g}" for value in sorted(set(peaks)))
        warnings.append(f"the law was fitted at a peak of {known}; {peak:g} is an extrapolation")
    if isinstance(longest, int) and steps > 3 * longest:
        warnings.append(f"the law was fitted on runs of up to {longest:,} steps; {steps:,} is an extrapolation")
    return tuple(warnings)
