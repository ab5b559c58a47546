"""What weights are held to while they are trained, whatever the objective: few bits, or N of every M. Each is one file,
found by its name.

    train: {constraint: {name: quantized, bits: 2}}          in recipes of `train` and of `align`

A constraint as a recipe describes it is built once the model and its optimizer are there. It may put kernels of its own
before the model's (`model.ops`), and is called after every step of the optimizer.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from moesaic.model.transformer import Model
from moesaic.train.optimizers import Optimizer


class Unconstrained:
    """Weights that are free. What a constraint keeps of a run is a class that extends this one."""

    def after_step(self, step: int, lr: float) -> bool:
        """After optimizer step `step`, counted from 1, which was taken at the learning rate `lr`. True if it changed
        the weights at once, and a loss that jumps is no spike."""
        return False

    def notes(self) -> dict[str, Tensor]:
        """Metrics, for the record."""
        return {}

    def state(self) -> dict[str, Tensor]:
        """What the next step depends on."""
        return {}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """As it was saved."""


@dataclass(frozen=True)
class Constraint:
    def check(self) -> None:
        """Whether what it needs is there, before anything is made."""

    def build(self, model: Model, optimizer: Optimizer, steps: int) -> Unconstrained:
        """Hold this model to it for a run of `steps` steps."""
        raise NotImplementedError
