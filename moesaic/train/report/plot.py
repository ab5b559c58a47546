"""Plots of a run: loss, learning rate, throughput, and expert load.

plot_run("out/tiny")                                              # out/tiny/training.png
plot_runs({"cosine": "out/a", "wsd": "out/b"}, "out/compare.png")
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from moesaic.atomic import replacing_file
from moesaic.errors import UserError
from moesaic.train.report.metrics import Line, read_events, read_metrics
from moesaic.units import readable_count

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PLOT_FILE = "training.png"
Series = NDArray[np.float64]

# Told apart by every kind of colour vision, and in grey.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#555555", "#8c6bb1")
ALARM = "#c1121f"
STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 9.0,
    "axes.titlesize": 10.0,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#666666",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.7,
    "xtick.labelsize": 8.0,
    "ytick.labelsize": 8.0,
    "xtick.color": "#444444",
    "ytick.color": "#444444",
    "legend.fontsize": 8.0,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "lines.solid_capstyle": "round",
}


def plot_run(directory: str | Path, out: str | Path | None = None) -> Path:
    """Plot a run's curves; returns the path of the PNG, by default `DIR/training.png`."""
    directory = Path(directory)
    lines, events = lines_of(directory), read_events(directory)
    mixture = any("expert_load" in line for line in lines)
    with PlotFigure((10.5, 9.0 if mixture else 6.2)) as figure:
        grid = figure.add_gridspec(3 if mixture else 2, 2, height_ratios=[1.5, 1.0, 1.25][: 3 if mixture else 2])
        _draw_loss(figure.add_subplot(grid[0, :]), lines, events)
        _draw_rate(figure.add_subplot(grid[1, 0]), lines)
        _draw_speed(figure.add_subplot(grid[1, 1]), lines)
        if mixture:
            _draw_table(figure, figure.add_subplot(grid[2, 0]), lines)
            _draw_balance(figure.add_subplot(grid[2, 1]), lines)
        last = lines[-1]
        figure.suptitle(
            f"{directory.absolute().name}: {last['step']:,} steps, {readable_count(last['tokens'])} tokens",
            x=0.012,
            ha="left",
            fontsize=12,
            fontweight="bold",
        )
        return save(figure, Path(out) if out else directory / PLOT_FILE)


def plot_runs(runs: Mapping[str, str | Path], out: str | Path) -> Path:
    """Plot several runs in one figure, one colour each."""
    if not runs:
        raise UserError("plot", "no runs were named", "Name at least one run's directory.")
    found = {name: lines_of(Path(directory)) for name, directory in runs.items()}
    with PlotFigure((10.5, 6.6)) as figure:
        grid = figure.add_gridspec(2, 3, height_ratios=[1.7, 1.0])
        loss = figure.add_subplot(grid[0, :])
        rate, speed, balance = (figure.add_subplot(grid[1, column]) for column in range(3))
        for (name, lines), colour in zip(found.items(), colours(len(found))):
            steps, values = series(lines, "loss")
            smoothed = smooth(values)
            loss.plot(steps, values, color=colour, alpha=0.15, linewidth=0.8)
            loss.plot(steps, smoothed, color=colour, label=f"{name}  {_last(smoothed):.3f}")
            rate.plot(*series(lines, "lr"), color=colour)
            steps, values = series(lines, "tokens_per_second")
            speed.plot(steps, smooth(values), color=colour)
            steps, values = series(lines, "balance/max")
            balance.plot(steps, smooth(values), color=colour)
        label(loss, "Loss", "step")
        _fit_loss(loss, [series(lines, "loss")[1] for lines in found.values()])
        loss.legend(title="run, and its last loss", title_fontsize=8.0, loc="upper right")
        label(rate, "Learning rate", "step", from_zero=True)
        label(speed, "Tokens per second", "step", from_zero=True)
        label(balance, "Busiest expert, against the mean", "step")
        if not any("balance/max" in line for lines in found.values() for line in lines):
            balance.text(0.5, 0.5, "no experts", ha="center", va="center", transform=balance.transAxes, color="#888888")
        return save(figure, Path(out))


def smooth(values: Series, width: float | None = None) -> Series:
    """A straight line fitted around each value, near ones weighing more: no lag, and true to a slope at the ends too.

    What is nan counts for nothing.
    """
    count = len(values)
    width = max(1.0, count / 70) if width is None else width
    reach = int(min(3 * width, max(1, count - 1)))
    offsets = np.arange(reach, -reach - 1, -1)  # a convolution turns its kernel round
    bell = np.exp(-0.5 * (offsets / width) ** 2)
    known = np.isfinite(values)

    def around(series: Series, power: int) -> Series:
        return np.convolve(series, bell * offsets**power)[reach : reach + count]

    here, there = known.astype(np.float64), np.where(known, values, 0.0)
    s0, s1, s2 = (around(here, power) for power in range(3))
    t0, t1 = (around(there, power) for power in range(2))
    spread = s0 * s2 - s1**2
    line = (s2 * t0 - s1 * t1) / np.where(spread > 1e-9, spread, 1.0)
    mean = np.where(s0 > 1e-9, t0 / np.maximum(s0, 1e-9), np.nan)
    return np.where(spread > 1e-9, line, mean)  # a lone value has no slope


class PlotFigure:
    """A figure with our fonts and no window, closed at the end."""

    def __init__(self, size: tuple[float, float]) -> None:
        self._size = size

    def __enter__(self) -> Figure:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        self._style = matplotlib.rc_context(STYLE)
        self._style.__enter__()
        # Made without pyplot, so no window system is asked for and the user's own backend stays as it was.
        figure = Figure(figsize=self._size, dpi=130, layout="constrained", facecolor="white")
        FigureCanvasAgg(figure)
        return figure

    def __exit__(self, *error: Any) -> None:
        self._style.__exit__(*error)


def lines_of(directory: Path) -> list[Line]:
    lines = read_metrics(directory)
    if not lines:
        raise UserError(directory, "has no metrics yet", "Wait for the first step.")
    return lines


def series(lines: Sequence[Line], key: str) -> tuple[Series, Series]:
    steps = np.array([line["step"] for line in lines], dtype=np.float64)
    values = [line.get(key) for line in lines]
    return steps, np.array([np.nan if value is None else value for value in values], dtype=np.float64)


def _last(values: Series) -> float:
    known = values[np.isfinite(values)]
    return float(known[-1]) if len(known) else float("nan")


def colours(count: int) -> list[Any]:
    if count <= len(COLOURS):
        return list(COLOURS[:count])
    import matplotlib

    return [matplotlib.colormaps["viridis"](place / max(1, count - 1) * 0.92) for place in range(count)]


def label(axes: Axes, title: str, x: str, y: str = "", from_zero: bool = False) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.set_title(title)
    axes.set_xlabel(x)
    if y:
        axes.set_ylabel(y)
    axes.margins(x=0.01)
    axes.xaxis.set_major_locator(MaxNLocator(7, integer=True, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    if from_zero:
        axes.set_ylim(0, axes.get_ylim()[1] * 1.04)
        thousands = axes.get_ylim()[1] >= 1e4
        axes.yaxis.set_major_formatter(
            FuncFormatter(lambda value, _: f"{value / 1000:g} k" if thousands and value else f"{value:,.6g}")
        )


def _fit_loss(axes: Axes, curves: Sequence[Series]) -> None:
    """Limits that show the curves and their noise, but not the tip of every spike, nor the very first steps."""
    known = [curve[np.isfinite(curve)] for curve in curves if np.isfinite(curve).any()]
    if not known:
        return
    low = min(float(curve.min()) for curve in known)
    high = max(float(np.percentile(curve, 98.5 if len(curve) > 200 else 100)) for curve in known)
    margin = 0.05 * (high - low) or 0.5
    axes.set_ylim(low - margin, high + margin)


def _draw_loss(axes: Axes, lines: Sequence[Line], events: Sequence[Line]) -> None:
    steps, values = series(lines, "loss")
    smoothed = smooth(values)
    axes.plot(steps, values, color=COLOURS[0], alpha=0.28, linewidth=0.8, label="each step")
    axes.plot(steps, smoothed, color=COLOURS[0], label="smoothed")
    others = {key for line in lines for key in line if key.startswith("loss/")}
    for key, colour in zip(sorted(others), COLOURS[2:]):
        axes.plot(steps, smooth(series(lines, key)[1]), color=colour, linewidth=1.2, label=key)
    _fit_loss(axes, [values])
    _mark(axes, lines, events)
    label(axes, f"Loss (at the end {_last(smoothed):.3f})", "step")
    handles, labels = axes.get_legend_handles_labels()
    unique = dict(zip(labels, handles))  # a mark that occurs often is named once
    axes.legend(
        unique.values(),
        unique.keys(),
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),  # above the curves, not on them
        ncols=len(unique),
        borderaxespad=0.3,
        handlelength=1.6,
        columnspacing=1.4,
    )


def _mark(axes: Axes, lines: Sequence[Line], events: Sequence[Line]) -> None:
    """Losses dropped by a rewind, and a line where the run was rewound to."""
    top = axes.get_ylim()[1]
    seen = set()  # a resumed run meets the same spike again
    for event in events:
        where = (event.get("kind"), event["step"])
        if where in seen:
            continue
        seen.add(where)
        if event.get("kind") == "spike":
            axes.axvline(event["step"], color=ALARM, linewidth=0.9, linestyle=(0, (1, 2)), label="spike")
        elif event.get("kind") == "rewind":
            losses = [np.nan if loss is None else loss for loss in event.get("loss", [])]
            axes.plot(event.get("steps", []), losses, color=ALARM, linewidth=0.9, alpha=0.75, label="rewound")
            axes.axvline(event["to"], color=ALARM, linewidth=0.9, linestyle=(0, (4, 2)), label="rewound to here")
    skipped = [line["step"] for line in lines if line.get("skipped")]
    if skipped:
        axes.plot(
            skipped, [top] * len(skipped), "v", color=ALARM, markersize=5, label="skipped, not finite", clip_on=False
        )


def _draw_rate(axes: Axes, lines: Sequence[Line]) -> None:
    axes.plot(*series(lines, "lr"), color=COLOURS[1])
    label(axes, "Learning rate", "step", from_zero=True)


def _draw_speed(axes: Axes, lines: Sequence[Line]) -> None:
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    steps, values = series(lines, "tokens_per_second")
    axes.plot(steps, values, color=COLOURS[2], alpha=0.28, linewidth=0.8)
    axes.plot(steps, smooth(values), color=COLOURS[2])
    typical = float(np.nanmedian(values)) if np.isfinite(values).any() else 0.0
    label(axes, f"Tokens per second (median {typical:,.0f})", "step", from_zero=True)
    high = float(np.nanpercentile(values, 99.5)) if np.isfinite(values).any() else 1.0
    axes.set_ylim(0, high * 1.12 or 1.0)
    _, utilisation = series(lines, "mfu")
    known = np.isfinite(utilisation) & (values > 0) & (utilisation > 0)
    if known.any():
        share = float(np.median(utilisation[known] / values[known]))

        def to_share(speed: Any) -> Any:
            return speed * share

        def to_speed(utilisation: Any) -> Any:
            return utilisation / share

        # The same curve in another unit: the right-hand axis only restates the left.
        right = axes.secondary_yaxis("right", functions=(to_share, to_speed))
        right.set_ylabel("MFU")
        right.yaxis.set_major_locator(MaxNLocator(5))
        right.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
        right.spines["right"].set_visible(True)


def _draw_table(figure: Figure, axes: Axes, lines: Sequence[Line]) -> None:
    """Every expert's share of its layer's tokens, at the last full count."""
    from matplotlib.colors import TwoSlopeNorm
    from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator

    line = next((line for line in reversed(lines) if "table" in line.get("expert_load", {})), None)
    if line is None:
        axes.set_axis_off()
        return
    load = line["expert_load"]
    table, layers = load["table"], load["layers"]
    relative = np.full((len(table), max(len(counts) for counts in table)), np.nan)
    for row, counts in enumerate(table):
        total = sum(counts)
        if total:
            relative[row, : len(counts)] = np.array(counts) * len(counts) / total
    import matplotlib

    diverging = matplotlib.colormaps["RdBu_r"].with_extremes(bad="#d9d9d9")
    top = max(2.0, float(np.nanmax(relative)) if np.isfinite(relative).any() else 2.0)
    image = axes.imshow(
        np.ma.masked_invalid(relative),
        aspect="auto",
        interpolation="nearest",
        cmap=diverging,
        norm=TwoSlopeNorm(vcenter=1.0, vmin=0.0, vmax=top),
    )
    axes.grid(False)
    axes.set_title(f"Expert load, steps {line['step'] - load['table_steps'] + 1:,} to {line['step']:,}")
    axes.set_xlabel("expert")
    axes.set_ylabel("layer")
    axes.xaxis.set_major_locator(MaxNLocator(10, integer=True))
    shown = range(0, len(layers), max(1, -(-len(layers) // 12)))
    axes.yaxis.set_major_locator(FixedLocator(list(shown)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda row, _: str(layers[round(row)])))
    bar = figure.colorbar(image, ax=axes, pad=0.02)
    above = [tick for tick in MaxNLocator(3, steps=[1, 2, 5, 10]).tick_values(1.0, top) if 1.0 < tick <= top]
    bar.ax.yaxis.set_major_locator(FixedLocator([0.0, 0.5, 1.0, *above]))
    bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))
    bar.outline.set_visible(False)


def _draw_balance(axes: Axes, lines: Sequence[Line]) -> None:
    from matplotlib.ticker import MaxNLocator

    steps, worst = series(lines, "balance/max")
    mean = np.array(
        [
            np.mean(known)
            if (known := [v for v in line.get("expert_load", {}).get("max", []) if v is not None])
            else np.nan
            for line in lines
        ]
    )
    axes.plot(steps, worst, color=COLOURS[3], alpha=0.28, linewidth=0.8)
    axes.plot(steps, smooth(worst), color=COLOURS[3], label="worst layer")
    axes.plot(steps, smooth(mean), color=COLOURS[0], label="mean of layers")
    axes.axhline(1.0, color="#888888", linewidth=0.8, linestyle=(0, (2, 2)))
    label(axes, "Busiest expert, against the mean", "step")
    high = float(np.nanpercentile(worst, 99.5)) if np.isfinite(worst).any() else 2.0
    axes.set_ylim(0.9, max(high * 1.15, 1.5))
    _, dead = series(lines, "balance/dead")
    if np.nanmax(dead, initial=0) > 0:
        right = axes.twinx()
        right.plot(steps, dead, color=ALARM, linewidth=1.1, drawstyle="steps-post")
        right.set_ylabel("dead experts", color=ALARM)
        right.set_ylim(0, float(np.nanmax(dead)) * 1.6)
        right.yaxis.set_major_locator(MaxNLocator(5, integer=True))
        right.grid(False)
        right.spines["right"].set_visible(True)
    axes.legend(loc="upper right", ncols=2)


def save(figure: Figure, out: Path) -> Path:
    """Atomically, so that whoever looks while it is written sees the last one."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with replacing_file(out) as fresh:
        figure.savefig(fresh, format="png", metadata={"Software": "moesaic"})
    return out
