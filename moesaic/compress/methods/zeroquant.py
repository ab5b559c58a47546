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
from moesaic.compress.layerwise import LayerwiseCompressor
from moesaic.kernels.fake_quantization import FakeQuantizedKernels, Rounding, rounded_by
from moesaic.kernels.grid import Grid
from moesaic.kernels.interface import Kernels
from moesaic.kernels.quantized import QuantizedMatrix
from moesaic.model.block import Block
from moesaic.model.matrices import matrix_parameters, site_of


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
        """Adam on the weights before rounding; the rounding itself passes gradients through. A fit of one layer to its
        own float self, on rows that are in memory; nothing of a training run (batches of text, a loss of the model)."""
        grid = self._grid()
        names = matrix_parameters(block)
        sites = {site_of(name) for name in names}
        rounding: Rounding = lambda site, weight: rounded_by(grid, weight) if site in sites else None  # noqa: E731
        ops = cast(Kernels, FakeQuantizedKernels(calibrated.plain, rounding, self.activation_bits))
        parameters = {name: tensor for name, tensor in block.named_parameters() if name in names}
        learned = {name: tensor.detach().clone().requires_grad_() for name, tensor in parameters.items()}
        optimizer = torch.optim.Adam(
            [{"params": [t], "lr": self.rate * float(t.detach().abs().mean())} for t in learned.values()],
            betas=(0.9, 0.95),
        )
        pieces = list(calibrated.run(ops))
        before = _loss_of_all(block, parameters, pieces, calibrated)
        for step in range(self.steps):
            rows, run = pieces[step % len(pieces)]
            optimizer.zero_grad()
            loss = _loss(block, learned, run, calibrated.out_TD[rows])
            loss.backward()
            optimizer.step()
            for group in optimizer.param_groups:
                group["lr"] *= 1 - 1 / self.steps
        if _loss_of_all(block, learned, pieces, calibrated) < before:
            for name, tensor in parameters.items():
                tensor.data.copy_(learned[name].detach())


def _loss_of_all(block: Block, weights: dict[str, Any], pieces: Any, calibrated: CalibratedLayer) -> float:
    with torch.no_grad():
        return sum(float(_loss(block, weights, run, calibrated.out_TD[rows])) for rows, run in pieces)


def _loss(block: Block, weights: dict[str, Any], run: Any, wanted_TD: Tensor) -> Tensor:
    out_TD: Tensor = run(lambda x_TD, context: functional_call(block, weights, (x_TD, context)))
    return (out_TD - wanted_TD).square().mean()
