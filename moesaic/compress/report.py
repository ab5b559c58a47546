"""What compression cost, layer by layer: reconstruction errors from the layer store, and a plot of them; and what a
run of distillation left."""

from __future__ import annotations

import shutil
import statistics
from pathlib import Path
from typing import Any

from moesaic.compress.layer_store import RUN, LayerStore
from moesaic.train.report.metrics import METRICS
from moesaic.train.report.plot import COLOURS, STYLE

PLOT = "training.png"


def layer_errors(store: LayerStore) -> list[dict[str, Any]]:
    """For each layer the reconstruction error of each kind of matrix (experts' together), relative to its output."""
    found = []
    for name in store.names():
        if not name.startswith("layer-"):
            continue
        facts = store.about(name)["facts"]
        kinds: dict[str, list[float]] = {}
        for matrix, error in facts.get("errors", {}).items():
            stem, _, leaf = matrix.removesuffix(".weight").rpartition(".")
            kinds.setdefault(stem if leaf.isdigit() else f"{stem}.{leaf}", []).append(error)
        row: dict[str, Any] = {"layer": int(name.removeprefix("layer-"))}
        row["errors"] = {kind: round(statistics.fmean(errors), 6) for kind, errors in kinds.items()}
        if "layer_error" in facts:
            row["layer_error"] = round(facts["layer_error"], 6)
        if any(leaf.rpartition(".")[2].isdigit() for leaf in facts.get("shares", {})):
            shares = [share for leaf, share in facts["shares"].items() if leaf.rpartition(".")[2].isdigit()]
            row["least_routed"] = round(min(shares), 6)
        found.append(row)
    return found


def keep_run_report(store: LayerStore, out: Path) -> None:
    """The metrics and plot of a training run go with the model that it made."""
    for name, kept in ((METRICS, "distillation.jsonl"), (PLOT, "distillation.png")):
        file = store.folder / RUN / name
        if file.is_file():
            shutil.copyfile(file, out / kept)


def plot_errors(result: dict[str, Any], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = result["layer_errors"]
    kinds = sorted({kind for row in rows for kind in row["errors"]})
    with pyplot.rc_context(STYLE):
        figure, axes = pyplot.subplots(figsize=(8, 4), layout="constrained")
        for colour, kind in zip(COLOURS * 4, kinds, strict=False):
            points = [(row["layer"], row["errors"][kind]) for row in rows if kind in row["errors"]]
            axes.plot(*zip(*points, strict=True), color=colour, marker="o", markersize=3, label=kind)
        axes.set_yscale("log")
        axes.set_xlabel("layer")
        axes.set_ylabel("reconstruction error (squared, relative)")
        axes.set_title(f"{result['method']['name']}: {result['bits_per_weight']:.2f} bits per weight")
        if kinds:
            axes.legend(ncols=2)
        figure.savefig(file, dpi=120)
        pyplot.close(figure)
