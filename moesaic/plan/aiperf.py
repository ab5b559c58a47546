"""AIPerf (arXiv 2008.07141) in small: one number for how fast a machine trains, weighted by how well it learned.

    score_here().score, predict_score(load_cluster("64xH200")).score

AIPerf lets a cluster search for a network (AutoML), counts the operations of all training and validation analytically,
and multiplies operations per second by -ln(error), the best validation error reached: its regulated score. Here the
search is a few trials of network morphism (wider, then deeper, from the best so far) of a perceptron on a fixed
synthetic task, so it takes seconds. It is no AIPerf result and cannot be compared with one; it can be compared between
machines that run this file. Trials need no communication, so a cluster's score grows with its devices, as AIPerf's did
almost (4 to 512 nodes). What a prediction cannot know is the error; it takes a reference error instead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from moesaic.errors import UserError
from moesaic.plan import cost
from moesaic.plan.calibrate import Trial, machine_facts, run_trial
from moesaic.plan.hardware import Cluster, Device

REFERENCE_ERROR = 0.2  # what the search reaches on a CPU, near enough
MOST_ERROR = 0.35  # AIPerf v1 asks for 70 % of images right; below 65 % here something is broken


@dataclass(frozen=True)
class Task:
    """Sizes of the search; larger on devices that a small one would leave idle, as AIPerf's batch grows with memory."""

    width: int
    batch: int
    epochs: int
    dtype: str
    samples: int = 8192  # to train on; a quarter as many to validate on
    inputs: int = 32
    classes: int = 10

    def layers(self, trial: Trial) -> list[tuple[int, int]]:
        inside = [(trial.width, trial.width)] * (trial.depth - 1)
        return [(self.inputs, trial.width), *inside, (trial.width, self.classes)]

    def operations(self, trial: Trial) -> float:
        """Of one trial, matmuls only: two per weight and sample forward, twice that backward."""
        weights = sum(rows * columns for rows, columns in self.layers(trial))
        validation = 2 * weights * (self.samples // 4)
        return self.epochs * (6 * weights * self.samples + validation)


@dataclass(frozen=True)
class Score:
    operations_per_second: float
    error: float
    seconds: float
    devices: int
    trials: int

    @property
    def score(self) -> float:
        return self.operations_per_second * -math.log(self.error)

    def __str__(self) -> str:
        unit, name = next(((u, n) for u, n in ((1e15, "P"), (1e12, "T"), (1e9, "G")) if self.score >= u), (1e6, "M"))
        return (
            f"{self.score / unit:,.1f} {name}OPS regulated "
            f"({self.operations_per_second / unit:,.1f} {name}OPS at a validation error of {self.error:.0%})"
        )


SMALL = Task(width=256, batch=256, epochs=4, dtype="fp32")
LARGE = Task(width=8192, batch=2048, epochs=20, dtype="bf16")


def task_for(device: Device) -> Task:
    return SMALL if device.peak("bf16") < 1e13 else LARGE


def search_space(task: Task, best: Trial | None = None) -> list[Trial]:
    """The first trial, or the ones that grow out of the best so far: wider and deeper."""
    if best is None:
        return [Trial(task.width, 2)]
    return [Trial(best.width * 2, best.depth), Trial(best.width, best.depth + 1)]


def score_here(device: str | None = None, task: Task | None = None, seed: int = 0) -> Score:
    """Seconds on this machine: the GPU if there is one, or `device`."""
    kind = machine_facts(device)["kind"]
    chosen = task or (LARGE if kind == "cuda" else SMALL)
    first = search_space(chosen)[0]
    run_trial(kind, chosen.layers(first), chosen, seed, epochs=1)  # warm: kernels are loaded and tuned
    results: list[tuple[float, float, Trial]] = []
    waiting = [first]
    while waiting:
        trial = waiting.pop(0)
        error, seconds = run_trial(kind, chosen.layers(trial), chosen, seed, chosen.epochs)
        results.append((error, seconds, trial))
        if len(results) == 1:
            waiting = search_space(chosen, trial)
    return summary(chosen, results)


def summary(task: Task, results: Sequence[tuple[float, float, Trial]]) -> Score:
    """Of finished trials: error, seconds, sizes."""
    best = min(error for error, _, _ in results)
    if not 0 <= best <= MOST_ERROR:
        raise UserError(
            "score", f"the search only reached a validation error of {best:.0%}", "The machine computes wrong."
        )
    seconds = sum(took for _, took, _ in results)
    operations = sum(task.operations(trial) for _, _, trial in results)
    least = 1 / (task.samples // 4)  # no sample wrong: counted as one, or the score would be infinite
    return Score(operations / seconds, max(best, least), seconds, 1, len(results))


def predict_score(cluster: Cluster, error: float = REFERENCE_ERROR, task: Task | None = None) -> Score:
    """By the planner's cost functions; every device of the cluster does its own trials."""
    if not 0 < error < 1:
        raise UserError("error", f"must be between 0 and 1, not {error}")
    chosen = task or task_for(cluster.device)
    first = search_space(chosen)[0]
    trials = [first, *search_space(chosen, first)]
    seconds = sum(_trial_seconds(chosen, trial, cluster.device) for trial in trials)
    operations = sum(chosen.operations(trial) for trial in trials)
    return Score(operations / seconds * cluster.count, error, seconds, cluster.count, len(trials))


def _trial_seconds(task: Task, trial: Trial, device: Device) -> float:
    training = validating = 0.0
    for rows, columns in task.layers(trial):
        forward = cost.matmul(task.batch, columns, rows, device, task.dtype)
        forward += cost.elementwise(3 * 2.0 * task.batch * columns, device)  # bias and activation
        backward = cost.matmul(task.batch, rows, columns, device, task.dtype)
        backward += cost.matmul(rows, columns, task.batch, device, task.dtype)
        update = cost.elementwise(28.0 * rows * columns, device)  # gradient, weight and AdamW's two moments
        cast = cost.elementwise(6.0 * rows * columns, device) if task.dtype != "fp32" else 0.0
        training += forward + cast + backward + update
        validating += forward
    steps = task.samples // task.batch
    return task.epochs * (steps * training + math.ceil(steps / 4) * validating)
