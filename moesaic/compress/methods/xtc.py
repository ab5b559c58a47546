"""XTC (Wu et al. 2022): fewer layers, one or two bits per weight, and long distillation from the float model.

    moesaic compress out/tiny --method xtc --out out/extreme --data text.txt --samples 2000 bits=1 depth=0.5 steps=5000
    moesaic compress out/tiny --method xtc --out out/extreme bits=2 ternary=true steps=500

The paper's finding: no distillation in stages and no pretraining of the small model is needed, only more steps than
usual and a learning rate that suits. Weights are rounded in every step as they will be in the end. For runs over more
text than samples can hold, recipes/xtc.yaml trains the same student on prepared data; `steps=0 depth=1` then packs it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import torch

from moesaic.compress.distill import Distillation, reduced, train_student
from moesaic.compress.layer_store import Part, rounded_scales
from moesaic.compress.methods import Compressor
from moesaic.compress.methods.students import spread
from moesaic.kernels.grid import Grid
from moesaic.methods import Method
from moesaic.model.config import ModelConfig
from moesaic.model.matrices import matrix_parameters
from moesaic.model.transformer import Model

if TYPE_CHECKING:
    from moesaic.compress.job import Job


@dataclass(frozen=True)
class XTC(Compressor):
    bits: int = 2
    group: int = 64
    ternary: bool = False  # of two bits' four codes, -1, 0 and 1
    depth: float = 0.5
    steps: int = 300
    rate: float = 1e-3  # several times that of full precision
    batch: int = 1  # sequences a step

    own_layout: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self._grid()
        if not 0 < self.depth <= 1 or self.steps < 0 or self.rate <= 0 or self.batch < 1:
            raise ValueError("depth must be above 0 and at most 1, steps and rate not negative, batch at least 1")

    def _grid(self) -> Grid:
        return Grid(self.bits, self.group, symmetric=self.ternary, ternary=self.ternary)

    def run(self, job: Job) -> ModelConfig:
        kept = spread(len(job.config.layers), self.depth)
        config = replace(job.config, layers=tuple(job.config.layers[number] for number in kept), mtp=())
        grid = self._grid()
        rounded = {"bits": self.bits, "group": self.group, "symmetric": self.ternary, "ternary": self.ternary}
        learned = train_student(
            job,
            config,
            reduced(job, kept, config),
            Distillation(self.steps, self.rate, self.batch),
            Method("quantized", rounded),
        )
        with torch.device("meta"):
            small = {f"layers.{name}" for name in matrix_parameters(Model(config).layers)}
        part = Part(facts={"layers": kept})
        for name, tensor in learned.items():
            if name in small and tensor.dim() == 3:
                for expert, weight_OI in enumerate(tensor):
                    part.matrices[f"{name}.{expert}"] = rounded_scales(grid.matrix(weight_OI))
            elif name in small:
                part.matrices[name] = rounded_scales(grid.matrix(tensor))
            elif name in ("embed", "head") and job.ends_bits:
                part.matrices[name] = rounded_scales(Grid(job.ends_bits, 64).matrix(tensor))
            else:
                part.plain[name] = tensor
        job.store.put("student", part)
        return config
