"""Scores along a run's life: every suite on every checkpoint that is kept, written beside them as DIR/scores.jsonl.

    moesaic train recipes/tiny.yaml --out out/a train.save_every=20 train.keep_every=20
    moesaic evaluate out/a --suite tasks --checkpoints

The trainer stands below the suites and does not know them; it keeps checkpoints, and this reads them, during the run or
after it. What was measured of a checkpoint is not measured again. `moesaic law emerge` reads the file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from moesaic.errors import UserError
from moesaic.evaluate.evaluate import Evaluation, weights_of
from moesaic.evaluate.suites import Suite
from moesaic.json_lines import json_lines
from moesaic.train.checkpoints import Checkpoints
from moesaic.train.report.metrics import Journal

FILE = "scores.jsonl"
Line = dict[str, Any]


def evaluate_checkpoints(
    evaluation: Evaluation, runs: Sequence[Path], progress: Callable[[str, int, int], None]
) -> dict[str, list[Line]]:
    """By run, the lines of these suites, in the order of steps; only what is not in its file yet is measured."""
    if evaluation.out is not None:
        raise UserError("--out", "the scores of checkpoints are kept beside them", "Leave it out.")
    steps = {run: Checkpoints(run, 1, 0).steps() for run in runs}
    for run, kept in steps.items():
        if not kept:
            problem = (
                "holds no checkpoint, so it is not the directory of a run" if run.is_dir() else "no such directory"
            )
            raise UserError(run, problem, "Train with train.keep_every and train.save_every.")
    return {str(run): list(_of_run(evaluation, run, kept, progress)) for run, kept in steps.items()}


def _of_run(
    evaluation: Evaluation, run: Path, steps: Sequence[int], progress: Callable[[str, int, int], None]
) -> Iterator[Line]:
    file = run / FILE
    known = {_key(line): line for _, line in json_lines(file)} if file.is_file() and file.stat().st_size else {}
    journal = Journal(file)
    try:
        for step in steps:
            place = Checkpoints(run, 1, 0).path(step)
            for name, suite in evaluation.suites.items():
                line: Line = {"step": step, "suite": name, "options": options(suite, evaluation.data)}
                line["weights"] = weights_of(place)
                if _key(line) not in known:

                    def show(what: str, done: int, total: int, at: str = f"{run.name}, step {step}: {name}") -> None:
                        progress(at, done, total)

                    found = replace(evaluation, suites={name: suite}).run([str(place)], show)[str(place)][name]
                    line["numbers"] = {key: value for key, value in found.items() if key != "samples"}
                    journal.append(line)
                    known[_key(line)] = line
                yield known[_key(line)]
    finally:
        journal.close()


def options(suite: Suite, data: Path | None) -> dict[str, Any]:
    """What two scores must share to be compared."""
    return vars(suite) | ({"data": str(data)} if data is not None else {})


def _key(line: Line) -> str:
    return repr([line.get(name) for name in ("step", "suite", "options", "weights")])
