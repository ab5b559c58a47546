"""GPTQ (Frantar et al. 2022): round one input after the other, and let those still to come make up for each error.

    moesaic compress out/smollm2 --method gptq --out out/small bits=4 group=64
    moesaic compress out/smollm2 --method gptq --out out/small format=nvfp4

How it is done stands in `compress/gptq_rounding.py`, which other methods use too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import Tensor

from moesaic.compress.calibration_statistics import InputStatistics
from moesaic.compress.float_rounding import gptq_floats
from moesaic.compress.gptq_rounding import TURNS, gptq
from moesaic.compress.layerwise import LayerwiseCompressor, MatrixCompressor
from moesaic.compress.number_formats import NumberFormat, layouts_of
from moesaic.kernels.grid import Grid
from moesaic.kernels.quantized import QuantizedMatrix

if TYPE_CHECKING:
    from moesaic.compress.job import Job


@dataclass(frozen=True)
class GPTQ(LayerwiseCompressor):
    bits: int = 4
    group: int = 64
    symmetric: bool = False
    damping: float = 0.0  # 0: searched for
    turns: int = TURNS  # of refinement
    format: NumberFormat = "int"

    def __post_init__(self) -> None:
        self._grid()
        if not 0 <= self.damping <= 1:
            raise ValueError(f"damping must be from 0 to 1, not {self.damping}")
        if self.turns < 0:
            raise ValueError(f"turns must not be negative, not {self.turns}")

    def _grid(self) -> Grid:
        return Grid(self.bits, self.group, self.symmetric)

    @property
    def layouts(self) -> tuple[str, ...]:
        return layouts_of(self.format, self._grid())

    @property
    def not_joined(self) -> str:
        return super().not_joined if self.format == "int" else ""

    def matrix_compressor(self, job: Job) -> MatrixCompressor:
        if self.format != "int":
            return lambda name, weight_OI, statistics: gptq_floats(
                self.format, weight_OI, statistics, job.row_pieces(name), self.damping
            )
        grid = replace(self._grid(), whole_zeros=job.whole_zeros)
        return lambda name, weight_OI, statistics: gptq(weight_OI, statistics, grid, self.damping, self.turns)

    def matrix(self, name: str, weight_OI: Tensor, statistics: InputStatistics) -> QuantizedMatrix:
        return gptq(weight_OI, statistics, self._grid(), self.damping, self.turns)
