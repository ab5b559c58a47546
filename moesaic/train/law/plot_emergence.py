"""Plot of emergence: scores against the pretraining loss, which falls to the right, and against the step."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from moesaic.errors import UserError
from moesaic.train.law.emergence import Emergence


def draw(path: str | Path, found: Emergence, score: str) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # needs no display, and slow to import
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), dpi=120, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, sharey=True)
    for name in dict.fromkeys(point.run for point in found.points):
        mine = [point for point in found.points if point.run == name]
        scores = [point.score for point in mine]
        left.plot([point.loss for point in mine], scores, "o", markersize=4, label=Path(name).name)
        right.plot([point.step for point in mine], scores, "o-", markersize=3, linewidth=0.8)
    losses = np.array([point.loss for point in found.points])
    if found.seen:
        every = np.linspace(losses.min(), losses.max(), 300)
        left.plot(every, found.score(every), color="#333333", linewidth=1.2, label="chance until a threshold")
        left.axvspan(found.low, found.high, color="#333333", alpha=0.12)
    left.set_xlim(losses.max() + 0.03 * np.ptp(losses), losses.min() - 0.03 * np.ptp(losses))
    left.set_xlabel("pretraining loss")
    left.set_ylabel(score)
    left.legend(frameon=False, fontsize=8)
    right.set_xlabel("step")
    for axes in (left, right):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="png")
    except OSError as error:
        raise UserError(path, f"cannot be written ({error.strerror})") from None
