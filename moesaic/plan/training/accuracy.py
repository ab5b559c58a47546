"""The planner beside what others measured: every published training run and its predicted step, as table and plot."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from moesaic.plan.text_table import table
from moesaic.plan.training.expected_error import errors, expected_error

# Tables from which constants were set; the others were looked at when these stood (docs/plan.md).
TUNED = ("MegaScale", "Megatron-LM", "Selective", "Megatron-Core", "Llama 3", "Megatron-Bridge performance tables")


def is_tuned(source: str) -> bool:
    return source.startswith(TUNED) and "release" not in source


def accuracy_json() -> dict[str, Any]:
    rows = [
        {
            "source": run.source,
            "run": run.name,
            "device": run.cluster.device.name,
            "dtype": run.work.dtype,
            "measured_seconds": run.seconds,
            "planned_seconds": run.seconds * (1 + error),
            "error": error,
            "expected_error": expected_error(run.model, run.cluster.device).share,
            "tuned": is_tuned(run.source),
        }
        for run, error in errors()
    ]
    return {"rows": rows, "tuned": _summary(rows, True), "others": _summary(rows, False)}


def _summary(rows: list[dict[str, Any]], tuned: bool) -> dict[str, Any]:
    found = sorted(abs(row["error"]) for row in rows if row["tuned"] == tuned)
    covered = [abs(row["error"]) <= row["expected_error"] + 1e-12 for row in rows if row["tuned"] == tuned]
    return {
        "runs": len(found),
        "median": statistics.median(found),
        "nine_of_ten": found[min(len(found) - 1, int(0.9 * len(found)))],
        "worst": found[-1],
        "covered": sum(covered) / len(covered),
    }


def accuracy_text() -> str:
    report = accuracy_json()
    lines, last = [], ""
    for row in report["rows"]:
        if row["source"] != last:
            last = row["source"]
            lines.append(("", "", "", ""))
            lines.append((last, "", "", ""))
        measured, planned = f"{row['measured_seconds']:9.2f} s", f"{row['planned_seconds']:9.2f} s"
        lines.append((f"  {row['run']}, {row['dtype']}", measured, planned, f"{row['error']:+.1%}"))
    text = table([("run", " measured", "  planned", "error"), *lines])
    for name, what in (("tuned", "runs the constants were set by"), ("others", "other published runs")):
        found = report[name]
        text += (
            f"\n{found['runs']} {what}: median {found['median']:.1%}, nine of ten within {found['nine_of_ten']:.1%}, "
            f"worst {found['worst']:.1%}; the stated error covers {found['covered']:.0%}"
        )
    return text


def plot_accuracy(file: Path) -> None:
    """Planned against measured seconds of a step, both on logarithmic axes, with a band of 10 %."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    colours = {
        "a100": "#0072b2", "h100": "#009e73", "b200": "#cc79a7", "b300": "#f0e442", "gb200": "#e69f00",
        "gb300": "#d55e00",
    }  # fmt: skip
    figure = Figure(figsize=(6.4, 5.6), layout="constrained", dpi=150)
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    ends = [0.3, 150.0]
    axes.plot(ends, ends, color="0.4", linewidth=0.8)
    axes.fill_between(ends, [0.9 * end for end in ends], [1.1 * end for end in ends], color="0.9", label="within 10 %")
    rows = accuracy_json()["rows"]
    for device, colour in colours.items():
        for tuned, marker in ((True, "o"), (False, "^")):
            chosen = [row for row in rows if row["device"] == device and row["tuned"] == tuned]
            if chosen:
                label = f"{device.upper()}{'' if tuned else ', other runs'}"
                x, y = [row["measured_seconds"] for row in chosen], [row["planned_seconds"] for row in chosen]
                axes.scatter(x, y, s=22, color=colour, marker=marker, edgecolors="0.2", linewidths=0.3, label=label)
    axes.set(xscale="log", yscale="log", xlabel="measured step, seconds", ylabel="planned step, seconds")
    axes.set_title("Training steps: planned and published", fontsize=11)
    axes.legend(fontsize=7)
    figure.savefig(file)
