"""Distill the large model into a smaller one: a run of the one trainer with the objective `distill`.

It reads the calibration text. The run is in the layer store until compression is done, so it is resumed where it was,
and its metrics and plot then go with the model. The student's weights may be held to few bits as they are learned
(`train/constraints/quantized.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moesaic.compress.job import Job
from moesaic.data.packing import IGNORED, Batch
from moesaic.methods import Method
from moesaic.model import lineage
from moesaic.model.config import ModelConfig
from moesaic.model.transformer import Model
from moesaic.parallel.world import World
from moesaic.recipe import Recipe
from moesaic.recipe_sections import BalanceSection, SpikeSection, TrainSection
from moesaic.train.loop import train
from moesaic.train.run import Run

SAVES = 20  # checkpoints of a run, at least every 25 steps apart
WARMUP = 10


@dataclass(frozen=True)
class Distillation:
    steps: int
    rate: float
    batch: int = 1  # sequences a step
    teaching: float = 1.0  # share of the steps in which the teacher is followed; then the text alone (staged)
    weight: float = 0.9  # of the teacher against the text
    hidden: float = 0.0  # of hidden states


def reduced(job: Job, kept: list[int], config: ModelConfig) -> dict[str, Tensor]:
    """A student's first weights: the layers of the teacher that `kept` names, and everything around them."""
    with torch.device("meta"):
        names = list(Model(config).state_dict())
    found = {}
    for name in names:
        where = name.split(".")
        if where[0] == "layers":
            where[1] = str(kept[int(where[1])])
        found[name] = job.tensor(".".join(where))
    return found


def train_student(
    job: Job,
    config: ModelConfig,
    weights: dict[str, Tensor],
    distillation: Distillation,
    constraint: Method | None = None,
    recipe: Recipe | None = None,
) -> dict[str, Tensor]:
    """The student's weights after training, before rounding; `recipe` stands in for that of distillation."""
    if not distillation.steps:
        return weights
    with torch.device("meta"):
        student = Model(config, job.mode)
    student.load_state_dict({name: tensor.clone() for name, tensor in weights.items()}, assign=True)
    run = Run(
        recipe or recipe_for(job, distillation, constraint),
        job.store.run_folder(),
        quiet=True,
        name="distill",
        initial=(student, {}, lineage.read(job.source)),
        stream=lambda model: CalibrationStream(job, distillation),
        world=World(job.device),
    )
    train(run)
    if not run.done():  # Ctrl-C: the run is saved, and compression goes no further
        raise KeyboardInterrupt
    return {name: tensor.detach() for name, tensor in run.model.state_dict().items()}


def recipe_for(job: Job, distillation: Distillation, constraint: Method | None) -> Recipe:
    objective = {"teacher": str(job.source), "weight": distillation.weight, "teaching": distillation.teaching}
    return Recipe(
        train=TrainSection(
            objective=Method("distill", {**objective, "hidden": distillation.hidden}),
            constraint=constraint,
            steps=distillation.steps,
            warmup_steps=min(WARMUP, distillation.steps - 1),
            save_every=max(25, distillation.steps // SAVES),
            dtype="float32",
            spike=SpikeSection(sigmas=0),  # the loss jumps where the teacher leaves
        ),
        optimizer=Method("adamw", {"lr": distillation.rate, "weight_decay": 0.0}),
        schedule=Method("linear", {"floor": 0.0}),
        balance=BalanceSection(bias_rate=0.0),  # tokens go where the teacher's go
    )


class CalibrationStream(Iterator[Batch]):
    """The calibration sequences in turn, without end."""

    def __init__(self, job: Job, distillation: Distillation, step: int = 0) -> None:
        self.job, self.distillation, self.step = job, distillation, step

    @property
    def position(self) -> dict[str, Any]:
        return {"step": self.step, "tokens": 0}

    def from_position(self, position: Mapping[str, Any] | None) -> CalibrationStream:
        return CalibrationStream(self.job, self.distillation, 0 if position is None else int(position["step"]))

    def skip(self, past: int | Mapping[str, Any]) -> CalibrationStream:
        return self  # every sequence comes again

    def __next__(self) -> Batch:
        self.job.progress("distilling", self.step, self.distillation.steps)
        first, count = self.step * self.distillation.batch, len(self.job.sequences)
        chosen = [self.job.sequences[number % count] for number in range(first, first + self.distillation.batch)]
        lengths = [len(tokens) for tokens in chosen]
        tokens_T = torch.tensor([token for tokens in chosen for token in tokens])
        targets_T = torch.tensor([token for tokens in chosen for token in [*tokens[1:], IGNORED]])
        self.step += 1
        return Batch(tokens_T, targets_T, lengths, [0] * len(lengths), sum(lengths) - len(lengths), self.position)
