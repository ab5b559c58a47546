"""Plot of a loss curve: measured, where there is a run, and predicted, with the learning rate below."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from moesaic.errors import UserError
from moesaic.train.law.loss_law import Array
from moesaic.train.law.runs import LossCurve, smooth

TRUE, PREDICTED, OTHERS = "#1f77b4", "#d62728", ("#555555", "#2ca02c", "#9467bd")


def draw(
    path: str | Path,
    title: str,
    rates: Array,
    predicted: Array,
    run: LossCurve | None = None,
    window: int = 1,
    others: dict[str, tuple[Array, Array]] | None = None,
) -> None:
    """Write a PNG. `rates` are those of every step, warm-up included, and `predicted` the losses after warm-up;
    `others` are further schedules by name, each with its rates and its predicted losses."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # needs no display, and slow to import
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 6), dpi=120, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    shown = [predicted]
    if run is not None:
        steps = run.warmup + np.arange(len(run.losses))
        curve = smooth(run.losses, window)
        if window > 1:
            top.plot(steps, run.losses, color=TRUE, alpha=0.2, linewidth=0.6)
        whole = np.flatnonzero(np.isfinite(curve))  # where a loss was measured
        whole = whole[whole < len(curve) - window // 2]  # beyond, less than a window is left, and the mean is noise
        label = f"true, mean of {window} steps" if window > 1 else "true"
        top.plot(steps[whole], curve[whole], color=TRUE, linewidth=1.4, label=label)
        bottom.plot(steps, run.rates, color=TRUE, linewidth=3, alpha=0.3)
        shown.append(curve[np.isfinite(curve)])
    for color, (name, (other, losses)) in zip(OTHERS, (others or {}).items()):
        top.plot(_after(other, losses), losses, color=color, linewidth=1, linestyle=":", label=f"predicted, {name}")
        bottom.plot(np.arange(len(other)), other, color=color, linewidth=1, linestyle=":")
        shown.append(losses)
    top.plot(_after(rates, predicted), predicted, color=PREDICTED, linewidth=1.4, linestyle="--", label="predicted")
    bottom.plot(np.arange(len(rates)), rates, color=PREDICTED, linewidth=1.2)
    # The first steps' losses would squeeze everything else into a line.
    every = np.concatenate([losses[len(losses) // 20 :] for losses in shown])
    margin = 0.05 * (every.max() - every.min()) or 0.1
    top.set_ylim(every.min() - margin, every.max() + margin)
    top.set_title(title)
    top.set_ylabel("loss")
    top.legend(frameon=False)
    bottom.set_ylabel("learning rate")
    bottom.set_xlabel("step")
    bottom.set_ylim(bottom=0)
    bottom.ticklabel_format(axis="y", style="sci", scilimits=(-2, 2))
    for axes in (top, bottom):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="png")
    except OSError as error:
        raise UserError(path, f"cannot be written ({error.strerror})") from None


def _after(rates: Array, losses: Array) -> Array:
    return np.arange(len(rates) - len(losses), len(rates), dtype=np.float64)
