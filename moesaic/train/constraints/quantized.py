"""Quantization-aware training (Jacob et al. 2018): every forward multiplies by the weights as they will be quantized.

    train: {constraint: {name: quantized, bits: 1, group: 64}}                      binary (XTC, Wu et al. 2022)
    train: {constraint: {name: quantized, bits: 2, ternary: true}}                  -1, 0 and 1 times a scale
    train: {constraint: {name: quantized, bits: 4, group: 64, activation_bits: 8}}  W4A8

The run's directory holds the float weights that are rounded; `moesaic compress DIR --method rtn` with the same options
then makes the very codes it was trained with. The embedding, the LM head, routers, norms and prediction layers are
free.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import cast

from torch import Tensor

from moesaic.kernels.fake_quantization import FakeQuantizedKernels, rounded_by
from moesaic.kernels.grid import Grid
from moesaic.kernels.interface import Kernels
from moesaic.model.matrices import matrix_parameters, site_of
from moesaic.model.transformer import Model
from moesaic.train.constraints import Constraint, Unconstrained
from moesaic.train.optimizers import Optimizer


@dataclass(frozen=True)
class Quantized(Constraint):
    bits: int = 4
    group: int = 64
    symmetric: bool = True
    ternary: bool = False
    activation_bits: int = 16

    def __post_init__(self) -> None:
        self.grid()

    def grid(self) -> Grid:
        return Grid(self.bits, self.group, self.symmetric, self.activation_bits, ternary=self.ternary)

    def build(self, model: Model, optimizer: Optimizer, steps: int) -> Unconstrained:
        grids = {f"layers.{site_of(name)}": self.grid() for name in matrix_parameters(model.layers)}
        fake_quantize(model, grids, self.activation_bits)
        return Unconstrained()


def fake_quantize(model: Model, grids: dict[str, Grid], activation_bits: int = 16) -> None:
    """From now on the model multiplies by rounded weights; grids by call site."""
    ops = FakeQuantizedKernels(model.ops, partial(_rounded, grids), activation_bits)
    model.ops = cast(Kernels, ops)


def _rounded(grids: dict[str, Grid], site: str, weight: Tensor) -> Tensor | None:
    grid = grids.get(site)
    return None if grid is None else rounded_by(grid, weight)
