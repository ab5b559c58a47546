"""Plots of an alignment: reward, accuracy on held-out tasks, completion length, entropy and KL, and what it took.

plot_alignment(Path("out/aligned"))         # out/aligned/alignment.png, of whatever its metrics hold
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from moesaic.phases import PREFIX, phase_totals
from moesaic.train.report.plot import COLOURS, PlotFigure, colours, label, lines_of, save, series, smooth

FILE = "alignment.png"

# Title, and the metrics plotted in it with their names. A panel is plotted where the first of them is there.
PANELS: tuple[tuple[str, dict[str, str]], ...] = (
    ("Held-out accuracy, and mean reward", {"accuracy": "accuracy", "reward": "reward"}),
    ("Preference accuracy on a step's pairs", {"pairs_right": "pairs"}),
    ("Completion length (tokens)", {"answer_tokens": "tokens"}),
    ("Entropy and KL from the reference", {"entropy": "entropy", "loss/kl": "KL"}),
    ("|Δlogp| between trainer and engine", {"mismatch_max": "largest", "mismatch_mean": "mean"}),
    ("Staleness (versions between sampling and training)", {"staleness_max": "largest", "staleness_mean": "mean"}),
    ("Draft tokens accepted in a step", {"accepted_per_step": "accepted"}),
)
TIME = "Seconds of a step, by phase"


def plot_alignment(directory: Path) -> Path | None:
    """Returns the plot's file; None where no panel has anything to show."""
    lines = lines_of(directory)
    known = {key for line in lines for key in line}
    panels = [(title, names) for title, names in PANELS if next(iter(names)) in known]
    if phases := phase_totals(lines):
        panels.append((TIME, {f"{PREFIX}{name}": name for name in phases}))  # the longest at the bottom
    if not panels:
        return None
    rows = -(-len(panels) // 2)
    with PlotFigure((10.5, 2.7 * rows + 0.4)) as whole:
        grid = whole.add_gridspec(rows, 2)
        for place, (title, names) in enumerate(panels):
            alone = place == len(panels) - 1 and place % 2 == 0
            axes = whole.add_subplot(grid[place // 2, :] if alone else grid[place // 2, place % 2])
            if title == TIME:
                stacked = [np.nan_to_num(smooth(series(lines, key)[1])) for key in names]
                axes.stackplot(
                    series(lines, next(iter(names)))[0], stacked, labels=names.values(), colors=colours(len(names))
                )
            for (key, name), colour in zip(names.items() if title != TIME else (), COLOURS):
                if key not in known:
                    continue
                steps, values = series(lines, key)
                measured = np.isfinite(values)
                rarely = measured.sum() < len(values)  # measured now and then: points, not a line of noise
                if rarely:
                    axes.plot(steps[measured], values[measured], color=colour, marker="o", markersize=4, label=name)
                else:
                    axes.plot(steps, values, color=colour, alpha=0.25, linewidth=0.8)
                    axes.plot(steps, smooth(values), color=colour, label=name)
            drawn = [series(lines, key)[1] for key in names if key in known]
            nothing = not any(np.nan_to_num(values).any() for values in drawn)
            label(axes, f"{title}: 0 throughout" if nothing else title, "step", from_zero=True)
            axes.legend(loc="best")
        name = directory.absolute().name
        whole.suptitle(f"{name}: {lines[-1]['step']:,} steps", x=0.012, ha="left", fontsize=12, fontweight="bold")
        return save(whole, directory / FILE)
