"""XTC (Wu et al. 2022): every second layer, one or two bits per weight, and long distillation from the float model.

    moesaic compress out/tiny --method xtc --out out/extreme bits=1 depth=0.5 steps=500

The paper's finding: no distillation in stages and no pretraining of the small model is needed, only more steps than
usual. Weights are rounded in every step as they will be in the end.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from moesaic.compress.distill import Distillation, reduced, train_student
from moesaic.compress.grid import Grid
from moesaic.compress.layer_store import Part, rounded_scales
from moesaic.compress.layers import matrices_of
from moesaic.compress.methods import Compressor
from moesaic.compress.methods.students import spread
from moesaic.compress.methods.zeroquant import rounding
from moesaic.model.config import ModelConfig
from moesaic.model.transformer import Model

if TYPE_CHECKING:
    from moesaic.compress.job import Job


@dataclass(frozen=True)
class XTC(Compressor):
    bits: int = 2
    group: int = 64
    depth: float = 0.5
    steps: int = 300
    rate: float = 3e-4

    own_layout: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self._grid()
        if not 0 < self.depth <= 1 or self.steps < 0 or self.rate <= 0:
            raise ValueError("depth must be above 0 and at most 1, steps and rate not negative")

    def _grid(self) -> Grid:
        return Grid(self.bits, self.group, symmetric=False)

    def run(self, job: Job) -> ModelConfig:
        kept = spread(len(job.config.layers), self.depth)
        config = replace(job.config, layers=tuple(job.config.layers[number] for number in kept), mtp=())
        grid = self._grid()
        with torch.device("meta"):
            model = Model(config)
        small = dict(matrices_of(model.layers))
        stems = {name.rpartition(".")[0] if name[-1].isdigit() else name for name in small}

        def as_kept(name: str, tensor: Tensor) -> Tensor:
            return rounding(tensor, grid) if name.removeprefix("layers.") in stems else tensor

        learned = train_student(job, config, reduced(job, kept, config), Distillation(self.steps, self.rate), as_kept)
        part = Part(facts={"layers": kept})
        for name, tensor in learned.items():
            own = name.removeprefix("layers.")
            if name.startswith("layers.") and own in stems and tensor.dim() == 3:
                for expert, weight_OI in enumerate(tensor):
                    part.matrices[f"{name}.{expert}"] = rounded_scales(grid.matrix(weight_OI))
            elif name.startswith("layers.") and own in stems:
                part.matrices[name] = rounded_scales(grid.matrix(tensor))
            elif name in ("embed", "head") and job.ends_bits:
                part.matrices[name] = rounded_scales(Grid(job.ends_bits, 64).matrix(tensor))
            else:
                part.plain[name] = tensor
        job.store.put("student", part)
        return config
