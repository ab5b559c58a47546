"""ZeroQuant (Yao et al. 2022): weights by group, activations by token, and each layer distilled from its float self.

    moesaic compress out/smollm2 --method zeroquant --out out/w8a8 bits=8 group=0
    moesaic compress out/smollm2 --method zeroquant --out out/w4a8 bits=4 group=64 steps=50

What flows into a matrix is rounded to 8 bits with one scale per token, found as it comes (W8A8, W4A8). Layer-by-layer
distillation then moves the weights so that the rounded layer gives what the float layer gave. It needs no original
data: any text will do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.func import functional_call

from moesaic.compress.calibration_statistics import CalibratedLayer, InputStatistics
from moesaic.compress.grid import Grid
from moesaic.compress.layers import matrices_of
from moesaic.compress.layerwise import LayerwiseCompressor
from moesaic.kernels.interface import Kernels
from moesaic.kernels.quantized import QuantizedMatrix, rounded_to_8_bits
from moesaic.kernels.wrapped import WrappedKernels
from moesaic.model.block import Block


@dataclass(frozen=True)
class ZeroQuant(LayerwiseCompressor):
    bits: int = 8
    group: int = 0
    activation_bits: int = 8
    steps: int = 20  # of distillation, each over one piece of the text
    rate: float = 0.02  # how far a step may move a weight, as a share of their mean size

    @property
    def not_joined(self) -> str:
        return "8-bit weights for 8-bit activations" if self.bits == self.activation_bits == 8 else ""

    def __post_init__(self) -> None:
        self._grid()
        if self.steps < 0 or not 0 < self.rate < 1:
            raise ValueError("steps must not be negative, and rate between 0 and 1")

    def _grid(self) -> Grid:
        return Grid(self.bits, self.group, activation_bits=self.activation_bits)

    def matrix(self, name: str, weight_OI: Tensor, statistics: InputStatistics) -> QuantizedMatrix:
        return self._grid().matrix(weight_OI)

    def prepare(self, block: Block, calibrated: CalibratedLayer) -> dict[str, Tensor]:
        if self.steps:
            with torch.enable_grad():
                self._distil(block, calibrated)
        return {}

    def _distil(self, block: Block, calibrated: CalibratedLayer) -> None:
        """Adam on the weights before rounding; the rounding itself passes gradients through."""
        grid = self._grid()
        ops = cast(Kernels, _RoundingKernels(calibrated.plain, self.activation_bits))
        stems = {name.rpartition(".")[0] if name[-1].isdigit() else name for name, _ in matrices_of(block)}
        parameters = {name: tensor for name, tensor in block.named_parameters() if name in stems}
        learned = {name: tensor.detach().clone().requires_grad_() for name, tensor in parameters.items()}
        optimizer = torch.optim.Adam(
            [{"params": [t], "lr": self.rate * float(t.detach().abs().mean())} for t in learned.values()],
            betas=(0.9, 0.95),
        )
        pieces = list(calibrated.run(ops))
        before = self._loss_of_all(block, parameters, grid, pieces, calibrated)
        for step in range(self.steps):
            rows, run = pieces[step % len(pieces)]
            optimizer.zero_grad()
            loss = self._loss(block, learned, grid, run, calibrated.out_TD[rows])
            loss.backward()
            optimizer.step()
            for group in optimizer.param_groups:
                group["lr"] *= 1 - 1 / self.steps
        if self._loss_of_all(block, learned, grid, pieces, calibrated) < before:
            for name, tensor in parameters.items():
                tensor.data.copy_(learned[name].detach())

    def _loss_of_all(
        self, block: Block, weights: dict[str, Any], grid: Grid, pieces: Any, calibrated: CalibratedLayer
    ) -> float:
        with torch.no_grad():
            return sum(float(self._loss(block, weights, grid, run, calibrated.out_TD[rows])) for rows, run in pieces)

    def _loss(self, block: Block, weights: dict[str, Any], grid: Grid, run: Any, wanted_TD: Tensor) -> Tensor:
        tensors = {name: rounding(tensor, grid) for name, tensor in weights.items()}
        out_TD: Tensor = run(lambda x_TD, context: functional_call(block, tensors, (x_TD, context)))
        return (out_TD - wanted_TD).square().mean()


def rounding(tensor: Tensor, grid: Grid) -> Tensor:
    """What it is rounded to, with the gradient of no rounding."""
    flat = tensor.detach().flatten(0, -2)
    return tensor + (grid.rounded(flat).view_as(tensor) - tensor.detach())


class _RoundingKernels(WrappedKernels):
    """Kernels whose matmuls see their inputs rounded to 8 bits."""

    def __init__(self, plain: Kernels, activation_bits: int) -> None:
        super().__init__(plain)
        self._bits = activation_bits

    def linear(self, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None, site: str = "") -> Tensor:
        if self._bits == 8:
            x_TI = x_TI + (rounded_to_8_bits(x_TI.detach()) - x_TI.detach())
        return self.plain.linear(x_TI, weight_OI, bias_O, site)
