"""The life of runs as emergence sees it: the pretraining loss at each checkpoint, and what it scored there.

points, suite = read_points(["out/small", "out/large"])          # from metrics.jsonl and scores.jsonl
points, suite = read_points(runs, suite="tasks", key="by_kind.gcd", loss=HELD_OUT)
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moesaic.errors import UserError
from moesaic.json_lines import json_lines
from moesaic.strict import did_you_mean
from moesaic.train.law.emergence import LEAST, Point
from moesaic.train.law.runs import LOSS, LossCurve, read_runs

FILE = "scores.jsonl"
REMEDY = "Write it with moesaic evaluate RUN --suite NAME --checkpoints."


def read_points(
    runs: Sequence[str | Path],
    suite: str | None = None,
    key: str = "accuracy",
    loss: str = LOSS,
    window: int | None = None,
) -> tuple[list[Point], dict[str, Any]]:
    """Every checkpoint with a score, and which suite that is of, with its options."""
    points: list[Point] = []
    asked: dict[str, Any] = {}
    for curve in read_runs(runs, loss, LEAST):
        lines = _lines(Path(curve.name), suite)
        for step, line in sorted(lines.items()):
            mine = {"suite": line["suite"], "options": line.get("options", {})}
            asked = asked or mine
            if mine != asked:
                problem = f"holds scores of {_words(mine)}, and other lines {_words(asked)}"
                raise UserError(Path(curve.name) / FILE, problem, "Name one with --suite, or evaluate all alike.")
            known = _loss(curve, step, window or curve.window)
            if known is not None:
                score, count = _score(Path(curve.name) / FILE, line, key)
                points.append(Point(curve.name, step, known, score, count))
    return points, asked


def _lines(run: Path, suite: str | None) -> dict[int, dict[str, Any]]:
    """The newest line of each step; of the suite that is asked for, if one is."""
    file = run / FILE
    if not file.is_file():
        raise UserError(file, "no such file", REMEDY)
    found: dict[int, dict[str, Any]] = {}
    names = set()
    for place, line in json_lines(file):
        if not isinstance(line.get("step"), int) or not isinstance(line.get("numbers"), dict) or "suite" not in line:
            raise UserError(place, "needs step, suite and numbers", REMEDY)
        names.add(str(line["suite"]))
        if suite is None or line["suite"] == suite:
            found[line["step"]] = line
    if not found:
        raise UserError("--suite", f"{file} has no scores of {suite}{did_you_mean(str(suite), sorted(names))}")
    if suite is None and len(names) > 1:
        raise UserError("--suite", f"missing, and {file} has scores of {', '.join(sorted(names))}", "Name one.")
    return found


def _score(file: Path, line: dict[str, Any], key: str) -> tuple[float, int]:
    at: Any = line["numbers"]
    for part in key.split("."):
        names = sorted(at) if isinstance(at, dict) else []
        if part not in names:
            raise UserError("--score", f"{file}: step {line['step']} has no {key}{did_you_mean(part, names)}")
        at = at[part]
    count = line["numbers"].get("examples")
    if not isinstance(at, int | float) or not 0 <= at <= 1:
        raise UserError("--score", f"{key} is {at!r} at step {line['step']} of {file}, and not a share from 0 to 1")
    if not isinstance(count, int) or count < 1:
        raise UserError(file, f"step {line['step']} does not say how many examples it was measured on", REMEDY)
    if "." in key:  # one kind of several, whose examples take turns
        count = max(1, count // len(line["numbers"].get(key.partition(".")[0], [1])))
    return float(at), count


def _loss(run: LossCurve, step: int, window: int) -> float | None:
    """Around a step: the mean of single batches' losses; of held-out ones, which are few, the line between two."""
    at = step - 1 - run.warmup  # the first line is that of step 1
    good = np.isfinite(run.losses)
    if not 0 <= at < len(run.losses):
        return None
    if run.key != LOSS:
        known = np.flatnonzero(good)
        return float(np.interp(at, known, run.losses[known]))
    around = run.losses[max(0, at - window // 2) : at + window // 2 + 1]
    return float(np.nanmean(around)) if np.isfinite(around).any() else None


def _words(asked: dict[str, Any]) -> str:
    return f"{asked['suite']} {json.dumps(asked['options'])}"
