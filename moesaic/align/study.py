"""What a recipe's options are worth: every combination of some values of them, each with several seeds (as Does RLHF
Scale? does with samples per prompt, the reward model's size and its data).

study:
  axes: {"align.stages.1.group": [2, 4, 8], "align.stages.1.rewards.0.path": [out/small-judge, out/large-judge]}
  seeds: [0, 1, 2]
  measure: accuracy

A cell is a run of `align` in a folder of its own, named by its values, which resumes as any run does; what is measured
of it is kept beside it, so that the same command goes on where it was stopped. The table has, for each value, the mean
over the other axes with its 95 % interval over the seeds, and what it gains over the axis's first value, seed by seed.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from moesaic import atomic
from moesaic.align.align import align, checked
from moesaic.align.stages import Stage
from moesaic.data.preparation.prepare import Status
from moesaic.errors import UserError
from moesaic.intervals import Across, across
from moesaic.json_files import read_json
from moesaic.json_lines import json_lines
from moesaic.recipe import Recipe, with_values
from moesaic.strict import did_you_mean
from moesaic.train.report.metrics import METRICS

RESULT = "study.json"
CELLS = "cells"
MODEL = "model"  # the axis of what is started from


@dataclass(frozen=True)
class Cell:
    """One run: a value of every axis, and a seed."""

    values: dict[str, Any]
    seed: int

    @property
    def name(self) -> str:
        """As a folder: the last words of its keys with their values, and a few characters that tell it from others."""
        said = "-".join(f"{key.rpartition('.')[2]}={value}" for key, value in self.values.items())
        digest = hashlib.blake2b(json.dumps(self.values, sort_keys=True).encode(), digest_size=3).hexdigest()
        return f"{re.sub(r'[^A-Za-z0-9=_-]+', '_', said)[:80]}-{digest}-seed{self.seed}"


@dataclass(frozen=True)
class Row:
    """A value of an axis, over all cells that have it."""

    axis: str
    value: Any
    score: Across
    gain: Across | None  # over the axis's first value; None: it is the first


@dataclass(frozen=True)
class Combination:
    values: dict[str, Any]
    score: Across


@dataclass(frozen=True)
class Study:
    measure: str
    cells: list[dict[str, Any]]  # values, seed and score of each
    combined: list[Combination]
    rows: list[Row]

    def text(self) -> str:
        """A table of the axes and, where there are several, one of their combinations."""
        rows = [
            (row.axis, _short(row.value), str(row.score), "" if row.gain is None else f"{row.gain:+}")
            for row in self.rows
        ]
        text = _table([("axis", "value", self.measure, "gain over the first"), *rows])
        names = list(self.combined[0].values)
        if len(names) < 2:
            return text
        lines = [(*map(_short, one.values.values()), str(one.score)) for one in self.combined]
        return f"{text}\n\n{_table([(*names, self.measure), *lines])}"


def _table(lines: list[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def run_study(
    recipe: Recipe, model: Path, out: Path, *, on_status: Callable[[Status], None], log: Callable[[str], None]
) -> Study:
    asked = recipe.study
    cells = cells_of(recipe)
    for cell in cells:  # all are seen to be possible before the first is run
        seen, _, names, layout = checked(of_cell(recipe, cell), _start(cell, model), out / CELLS / cell.name)
        if layout.devices > 1:
            raise UserError("--study", "runs its cells in one process", "Leave out torchrun, and set parallel to 1.")
        check_measure(asked.measure, seen.build(f"align.stages.{len(names) - 1}", Stage))
    scores = []
    for number, cell in enumerate(cells):
        on_status(Status(cell.name, number, len(cells)))
        scores.append(score(recipe, cell, model, out))
        log(f"{cell.name}: {asked.measure} {scores[-1]:.4f}")
    study = summary(asked.measure, cells, scores)
    atomic.write_json(out / RESULT, plain(study))
    return study


def check_measure(measure: str, last: Stage) -> None:
    """Refuse what the last stage will not measure."""
    known = last.metrics()
    if any(fnmatchcase(measure, pattern) for pattern in known):
        return
    problem = f'the last stage has no metric "{measure}"{did_you_mean(measure, known)}'
    measured = ", ".join(last.measures()) or "nothing with this data"
    remedy = f"On held-out data it measures {measured}; evaluate_every and evaluate must be above 0."
    raise UserError("study.measure", problem, remedy)


def has_progress(out: Path) -> bool:
    return (out / CELLS).is_dir()


def cells_of(recipe: Recipe) -> list[Cell]:
    asked = recipe.study
    if not asked.axes:
        remedy = 'Name some, as in study: {axes: {"align.stages.0.group": [2, 4, 8]}}.'
        raise UserError(recipe.origin(("study",)), "study.axes is empty", remedy)
    for key, given in {
        "study.seeds": asked.seeds,
        **{f"study.axes: {key}": v for key, v in asked.axes.items()},
    }.items():
        if len({json.dumps(value) for value in given}) < len(given):
            raise UserError(key, "names a value twice", "What is run twice is no evidence more.")
        if key.endswith(".seed"):
            raise UserError(key, "a study's seeds are not an axis", "Name them in study.seeds.")
    names, values = list(asked.axes), list(asked.axes.values())
    return [
        Cell(dict(zip(names, chosen, strict=True)), seed)
        for chosen in itertools.product(*values)
        for seed in asked.seeds
    ]


def of_cell(recipe: Recipe, cell: Cell) -> Recipe:
    """The recipe with the cell's values; its seed is that of every stage and of training."""
    overrides = {key: value for key, value in cell.values.items() if key != MODEL}
    seeds = {f"align.stages.{number}.seed": cell.seed for number in range(len(recipe.align.stages))}
    return with_values(recipe, overrides | seeds, "study.axes")


def score(recipe: Recipe, cell: Cell, model: Path, out: Path) -> float:
    """What is measured of a cell's run, or was before for the very same."""
    place = out / CELLS / cell.name
    file, mine = place.with_suffix(".json"), of_cell(recipe, cell)
    asked = {key: value for key, value in mine.dump().items() if key != "study"}
    request = {"recipe": asked, "model": str(_start(cell, model)), "measure": recipe.study.measure}
    known = read_json(file) if file.is_file() else {}
    if known.get("request") == request:
        return float(known["score"])
    summaries = align(mine, _start(cell, model), place, quiet=True)["stages"]
    if summaries[-1]["outcome"] == "stopped":
        raise KeyboardInterrupt  # the run has saved where it was
    found = last_of(place / METRICS, recipe.study.measure)
    atomic.write_json(file, {"score": found, "request": request})
    return found


def last_of(file: Path, measure: str) -> float:
    """The newest value of a metric of the last stage."""
    lines = [line for _, line in json_lines(file)]
    values = [line[measure] for line in lines if isinstance(line.get(measure), int | float)]
    if not values:
        known = sorted({key for line in lines for key in line})
        problem = f'the last stage has no metric "{measure}"{did_you_mean(measure, known)}'
        raise UserError("study.measure", problem, "metrics.jsonl of a cell has those there are.")
    return float(values[-1])


def summary(measure: str, cells: list[Cell], scores: list[float]) -> Study:
    """Of every value, seed by seed, the mean over the other axes; intervals are over the seeds."""
    found = {(json.dumps(cell.values), cell.seed): one for cell, one in zip(cells, scores, strict=True)}
    seeds = list(dict.fromkeys(cell.seed for cell in cells))
    combinations = list({json.dumps(cell.values): cell.values for cell in cells}.values())

    def mean(wanted: list[dict[str, Any]], seed: int) -> float:
        return statistics.mean(found[json.dumps(values), seed] for values in wanted)

    rows: list[Row] = []
    for axis in combinations[0]:
        first: list[float] = []
        for value in {json.dumps(values[axis]): values[axis] for values in combinations}.values():
            own = [mean([values for values in combinations if values[axis] == value], seed) for seed in seeds]
            gain = across([one - other for one, other in zip(own, first, strict=True)]) if first else None
            rows.append(Row(axis, value, across(own), gain))
            first = first or own
    combined = [Combination(values, across([mean([values], seed) for seed in seeds])) for values in combinations]
    every = [{"values": cell.values, "seed": cell.seed, "score": one} for cell, one in zip(cells, scores, strict=True)]
    return Study(measure, every, combined, rows)


def plain(study: Study) -> dict[str, Any]:
    """For JSON."""
    rows = [
        {"axis": row.axis, "value": row.value, "score": row.score.plain(), "gain": row.gain and row.gain.plain()}
        for row in study.rows
    ]
    combined = [{"values": one.values, "score": one.score.plain()} for one in study.combined]
    return {"measure": study.measure, "rows": rows, "combined": combined, "cells": study.cells}


def _start(cell: Cell, model: Path) -> Path:
    return Path(cell.values.get(MODEL, model))


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 40 else f"…{text[-39:]}"
