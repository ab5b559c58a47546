"""Mixture-of-Students (DeepSpeed-MoE, Rajbhandari et al. 2022): fewer layers, distilled from the whole mixture.

    moesaic compress out/mixture --method students --out out/student depth=0.75 steps=300

The student keeps the experts and takes every layer it can from the teacher. Distillation is staged: the teacher is
followed for the first part of the steps (`teaching`), and the text alone for the rest: a student of less depth cannot
follow to the end. It is a run of the one trainer (`compress/distill.py`); for runs over more text than samples can
hold, steps=0 makes the student, and `moesaic train` takes it as train.init with the objective `distill`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from moesaic.compress.distill import Distillation, reduced, train_student
from moesaic.compress.layer_store import Part
from moesaic.compress.methods import Compressor
from moesaic.errors import UserError
from moesaic.model.config import ModelConfig

if TYPE_CHECKING:
    from moesaic.compress.job import Job


@dataclass(frozen=True)
class Students(Compressor):
    depth: float = 0.75
    steps: int = 200
    rate: float = 3e-4
    teaching: float = 0.7
    batch: int = 1  # sequences a step

    def __post_init__(self) -> None:
        if not 0 < self.depth <= 1 or not 0 <= self.teaching <= 1 or self.steps < 0 or self.rate <= 0:
            raise ValueError("depth must be above 0 and at most 1, teaching from 0 to 1, steps and rate not negative")
        if self.batch < 1:
            raise ValueError("batch must be at least 1")

    @property
    def ends_bits(self) -> int:
        return 0

    def run(self, job: Job) -> ModelConfig:
        layers = len(job.config.layers)
        kept = spread(layers, self.depth)
        if self.depth < 1 and len(kept) == layers:
            raise UserError("depth", f"{self.depth:g} of {layers} layers are all of them", "Take less.")
        config = replace(job.config, layers=tuple(job.config.layers[number] for number in kept), mtp=())
        weights = train_student(
            job, config, reduced(job, kept, config), Distillation(self.steps, self.rate, self.batch, self.teaching)
        )
        job.store.put("student", Part(plain=weights, facts={"layers": kept}))
        return config


def spread(layers: int, depth: float) -> list[int]:
    """Which layers stay: evenly, the first and the last among them."""
    count = max(1, round(layers * depth))
    if count == 1:
        return [0]
    return [round(number * (layers - 1) / (count - 1)) for number in range(count)]
