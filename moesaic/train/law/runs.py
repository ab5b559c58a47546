"""A finished run as the loss law sees it: learning rates and losses after warm-up, read from its metrics.jsonl.

run = read_run("out/cosine")                 # a run's directory, or such a file itself
run.rates, run.losses, run.warmup_sum
smooth(run.losses, run.window)               # the curve without the noise of single batches
read_run("out/cosine", HELD_OUT)             # the losses on held-out text, which need no smoothing
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moesaic.errors import UserError
from moesaic.train.law.loss_law import Array

FILE = "metrics.jsonl"
LOSS, HELD_OUT = "loss", "loss/held_out"
MIN_STEPS = 50  # after warmup, below which a curve says too little
MAX_MISSING = 0.01  # share of the steps whose loss may be missing or not finite


@dataclass(frozen=True)
class LossCurve:
    """One run after its warm-up. A loss that was not finite, or not written, is nan."""

    name: str
    rates: Array
    losses: Array
    warmup_sum: float = 0.0
    warmup: int = 0
    recipe: Mapping[str, Any] | None = None
    key: str = LOSS  # the batches' own losses, or another that its lines have

    @property
    def peak(self) -> float:
        return float(self.rates.max())

    @property
    def window(self) -> int:
        # Measured on the same text every time, there is no noise of batches to take out.
        return default_window(len(self.rates)) if self.key == LOSS else 1


def default_window(steps: int) -> int:
    """Over how many steps losses are averaged unless somebody says otherwise: 2 % of the run, but at least some fifty,
    because the mean of fewer batches is still noise; of a run of some hundred steps a tenth."""
    return max(steps // 50, min(50, steps // 10)) | 1


def smooth(losses: Array, window: int) -> Array:
    """The mean over `window` steps around each, nan left out; near both ends the window shrinks and stays centred."""
    good = np.isfinite(losses)
    total = np.concatenate([[0.0], np.cumsum(np.where(good, losses, 0.0))])
    count = np.concatenate([[0], np.cumsum(good)])
    here = np.arange(len(losses))
    half = np.minimum(window // 2, np.minimum(here, len(losses) - 1 - here))
    low, high = here - half, here + half + 1
    with np.errstate(invalid="ignore"):
        return np.asarray((total[high] - total[low]) / (count[high] - count[low]))


def read_runs(paths: Sequence[str | Path], key: str = LOSS, least: int = MIN_STEPS) -> list[LossCurve]:
    """Read several, each of them once."""
    for number, path in enumerate(paths):
        if any(Path(path).resolve() == Path(other).resolve() for other in paths[:number]):
            raise UserError(path, "given twice", "A law needs runs with different schedules.")
    return [read_run(path, key, least) for path in paths]


def read_run(path: str | Path, key: str = LOSS, least: int = MIN_STEPS) -> LossCurve:
    """Read a run; `key` is the loss that is wanted of its lines, and `least` how many of them must be there. Of a step
    that is there twice, as after a resume, the last counts; a torn last line is left out."""
    path = Path(path)
    file = path / FILE if path.is_dir() else path
    rows = _rows(file, key)
    steps = sorted(rows)
    if not steps:
        raise UserError(file, "holds no step")
    if steps[0] > 1:
        raise UserError(file, f"begins at step {steps[0]:,}", "The law needs a run from its first step on.")
    rates_by_step, losses_by_step = zip(*(rows[step] for step in steps))
    every = np.arange(steps[0], steps[-1] + 1)
    rates = np.interp(every, steps, rates_by_step)
    losses = np.full(len(every), math.nan)
    losses[np.array(steps) - steps[0]] = [math.nan if loss is None else loss for loss in losses_by_step]

    warmup = warmup_steps(rates)
    before, recipe = float(rates[:warmup].sum()), _recipe(file.parent)
    run = LossCurve(str(path), rates[warmup:], losses[warmup:], before, warmup, recipe, key)
    written = sum(rows[step][1] is not None for step in steps if step >= steps[0] + warmup)
    _check(run, file, written / len(run.rates), least)
    return run


def warmup_steps(rates: Array) -> int:
    """How many steps come before the learning rate stops rising for the first time."""
    falls = np.flatnonzero(np.diff(rates) <= 0)
    return int(falls[0]) if len(falls) else len(rates) - 1


def _rows(file: Path, key: str) -> dict[int, tuple[float, float | None]]:
    """By step its learning rate and loss; None where a loss other than the batch's was not measured."""
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except FileNotFoundError:
        remedy = "Give a run's directory, as moesaic train writes it, or its metrics.jsonl."
        raise UserError(file, "no such file", remedy) from None
    except OSError as error:
        raise UserError(file, f"cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(file, "not a text file; metrics are one JSON object per line") from None
    rows: dict[int, tuple[float, float | None]] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            step, rate, loss = row["step"], row["lr"], row[LOSS]
        except (ValueError, KeyError, TypeError) as error:
            if number == len(lines):
                continue  # no newline at its end: the run is being written, or was killed
            lacks = f"has no {error}" if isinstance(error, KeyError) else "is not a JSON object"
            raise UserError(f"{file}:{number}", f"{lacks}; each line needs step, loss and lr") from None
        if not isinstance(step, int) or isinstance(step, bool) or step < 0:
            raise UserError(f"{file}:{number}", f"step is {json.dumps(step)}, not a whole number from 0 up")
        if not _finite(rate) or rate < 0:
            raise UserError(f"{file}:{number}", f"lr is {json.dumps(rate)}, not a number from 0 up")
        loss = row.get(key, ...)
        rows[step] = float(rate), None if loss is ... else float(loss) if _finite(loss) else math.nan
    if rows and all(loss is None for _, loss in rows.values()):
        raise UserError(file, f"has no {key}", "Train with train.evaluate_every." if key == HELD_OUT else "")
    return rows


def _finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _check(run: LossCurve, file: Path, logged: float, least: int) -> None:
    if len(run.rates) < least:
        raise UserError(
            file,
            f"has {len(run.rates):,} steps after warm-up, too few for a curve",
            f"At least {least} are needed.",
        )
    if not run.rates[0] > 0:
        raise UserError(file, "its learning rate is zero at the start")
    good = np.isfinite(run.losses)
    spoilt = 1 - good.mean() / min(1.0, logged)
    if spoilt > MAX_MISSING:
        first = run.warmup + int((~good).argmax())
        raise UserError(file, f"{spoilt:.1%} of its losses are missing or not finite, the first at step {first:,}")
    if good.sum() < least:
        raise UserError(file, f"has only {int(good.sum())} losses after warm-up", f"At least {least} are needed.")
    if (run.losses[good] <= 0).any():
        raise UserError(file, "has losses of zero or below, which the law cannot describe")


def _recipe(directory: Path) -> Mapping[str, Any] | None:
    """The recipe of the directory's last training, where its lineage has one."""
    if not (directory / "moesaic.json").is_file():
        return None
    from moesaic.model import lineage

    recipes = [stage.get("recipe") for stage in lineage.read(directory)]
    recipes = [recipe for recipe in recipes if isinstance(recipe, dict)]
    return recipes[-1] if recipes else None
