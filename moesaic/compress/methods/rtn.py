"""Round to nearest: every weight to the closest step of its group, without looking at any text.

moesaic compress out/smollm2 --method rtn --out out/small bits=4 group=64
moesaic compress out/smollm2 --method rtn --out out/small bits=8 group=0          one scale per channel
moesaic compress out/smollm2 --method rtn --out out/small format=fp8_block        floating-point numbers
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from moesaic.compress.calibration_statistics import InputStatistics
from moesaic.compress.layerwise import LayerwiseCompressor, MatrixCompressor
from moesaic.compress.number_formats import NumberFormat, layouts_of
from moesaic.kernels.grid import Grid
from moesaic.kernels.quantized import QuantizedMatrix
from moesaic.model.formats.float_matrix import rounded

if TYPE_CHECKING:
    from moesaic.compress.job import Job


@dataclass(frozen=True)
class RoundToNearest(LayerwiseCompressor):
    bits: int = 4
    group: int = 64
    symmetric: bool = True
    format: NumberFormat = "int"

    reads_text: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self._grid()

    def _grid(self) -> Grid:
        return Grid(self.bits, self.group, self.symmetric)

    @property
    def layouts(self) -> tuple[str, ...]:
        return layouts_of(self.format, self._grid())

    def matrix_compressor(self, job: Job) -> MatrixCompressor:
        if self.format == "int":
            return self.matrix
        return lambda name, weight_OI, statistics: rounded(self.format, weight_OI, job.row_pieces(name))

    def matrix(self, name: str, weight_OI: Tensor, statistics: InputStatistics) -> QuantizedMatrix:
        return self._grid().matrix(weight_OI)
