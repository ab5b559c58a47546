"""HQQ (Badri and Shaji 2023): half-quadratic search for each group's zero point, without any text.

    moesaic compress out/smollm2 --method hqq --out out/small bits=3 group=64

Large errors are few; so the size of the error is measured with an exponent below one, and split off step by step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from moesaic.compress.calibration_statistics import InputStatistics
from moesaic.compress.layerwise import LayerwiseCompressor
from moesaic.kernels.grid import Grid
from moesaic.kernels.quantized import QuantizedMatrix

EXPONENT, STIFFNESS, STIFFER = 0.7, 10.0, 1.01


@dataclass(frozen=True)
class HQQ(LayerwiseCompressor):
    bits: int = 4
    group: int = 64
    rounds: int = 20

    reads_text: ClassVar[bool] = False
    own_layout: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self._grid()
        if self.rounds < 1:
            raise ValueError(f"rounds must be at least 1, not {self.rounds}")

    def _grid(self) -> Grid:
        return Grid(self.bits, self.group, symmetric=False)

    def matrix(self, name: str, weight_OI: Tensor, statistics: InputStatistics) -> QuantizedMatrix:
        return half_quadratic(weight_OI, self._grid(), self.rounds)


def half_quadratic(weight_OI: Tensor, grid: Grid, rounds: int) -> QuantizedMatrix:
    scales_OG, zeros_OG = grid.fit(weight_OI)
    assert zeros_OG is not None
    grouped_OGX = grid.grouped(weight_OI)
    best_OG, least_OG = zeros_OG, torch.full_like(zeros_OG, float("inf"))
    # By this power of their size, weights of any scale are treated alike.
    stiffness = STIFFNESS / float(weight_OI.abs().mean().clamp(min=1e-8)) ** (2 - EXPONENT)
    scale = scales_OG[..., None]
    for _ in range(rounds):
        codes_OGX = (grouped_OGX / scale + zeros_OG[..., None]).round_().clamp_(0, grid.top)
        off_OGX = grouped_OGX - (codes_OGX - zeros_OG[..., None]) * scale
        error_OG = off_OGX.abs().pow(EXPONENT).sum(-1)
        better_OG = error_OG < least_OG
        best_OG, least_OG = torch.where(better_OG, zeros_OG, best_OG), torch.where(better_OG, error_OG, least_OG)
        if not bool(better_OG.any()):
            break
        # The part of the error that counts as an outlier (a generalised shrinkage), then the zeros that fit the rest.
        size_OGX = off_OGX.abs().clamp_(min=1e-12)
        kept_OGX = (size_OGX - size_OGX.pow(EXPONENT - 1) / stiffness).clamp_(min=0) * off_OGX.sign()
        zeros_OG = (codes_OGX - (grouped_OGX - kept_OGX) / scale).mean(-1).half().float()
        stiffness *= STIFFER
    return grid.matrix(weight_OI, (scales_OG, best_OG.half().float()))
