"""Round to nearest: every weight to the closest step of its group, without looking at any text.

moesaic compress out/smollm2 --method rtn --out out/small bits=4 group=64
moesaic compress out/smollm2 --method rtn --out out/small bits=8 group=0          one scale per channel
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from moesaic.compress.calibration_statistics import InputStatistics
from moesaic.compress.grid import Grid
from moesaic.compress.layerwise import LayerwiseCompressor
from moesaic.kernels.quantized import QuantizedMatrix


@dataclass(frozen=True)
class RoundToNearest(LayerwiseCompressor):
    bits: int = 4
    group: int = 64
    symmetric: bool = True

    reads_text: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self._grid()

    def _grid(self) -> Grid:
        return Grid(self.bits, self.group, self.symmetric)

    def matrix(self, name: str, weight_OI: Tensor, statistics: InputStatistics) -> QuantizedMatrix:
        return self._grid().matrix(weight_OI)
