"""AWQ (Lin et al. 2023): widen the inputs that carry large activations before rounding, so that they lose less.

    moesaic compress out/smollm2 --method awq --out out/small bits=4 group=64

The inputs' scale is taken out of what comes before: the norm ahead of attention and feed-forward, and the rows of the
up projection. So nothing is added at run time. How far to go is searched for each of these places.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moesaic.compress.calibration_statistics import CalibratedLayer, InputStatistics
from moesaic.compress.layerwise import LayerwiseCompressor
from moesaic.kernels.grid import Grid
from moesaic.kernels.quantized import QuantizedMatrix
from moesaic.model.attention import GroupedQueryAttention
from moesaic.model.block import Block
from moesaic.model.experts import DenseFeedForward, MixtureFeedForward
from moesaic.model.linear import Norm

STEPS = 11


@dataclass(frozen=True)
class AWQ(LayerwiseCompressor):
    bits: int = 4
    group: int = 64
    symmetric: bool = True

    def __post_init__(self) -> None:
        self._grid()

    def _grid(self) -> Grid:
        return Grid(self.bits, self.group, self.symmetric)

    def matrix(self, name: str, weight_OI: Tensor, statistics: InputStatistics) -> QuantizedMatrix:
        return self._grid().matrix(weight_OI, importance_I=statistics.importance_I)

    def prepare(self, block: Block, calibrated: CalibratedLayer) -> dict[str, Tensor]:
        changed: dict[str, Tensor] = {}
        if isinstance(block.attention, GroupedQueryAttention):
            statistics = calibrated.statistics("attention.qkv.weight")
            if statistics is not None:
                self._spread(block.attention_norm, [block.attention.qkv.weight], [], statistics)
                changed["attention_norm.weight"] = block.attention_norm.weight
        # Columns before rows: what flows into `down` was recorded before gate and up are touched.
        ffn = block.ffn
        readers: list[Tensor]
        others: list[Tensor] = []
        if isinstance(ffn, DenseFeedForward):
            self._rows(ffn, calibrated.statistics("ffn.down.weight"))
            statistics, readers = calibrated.statistics("ffn.gate_up.weight"), [ffn.gate_up.weight]
        else:
            assert isinstance(ffn, MixtureFeedForward)
            statistics, readers, others = self._experts(ffn, calibrated)
        if statistics is not None:
            self._spread(block.ffn_norm, readers, others, statistics)
            changed["ffn_norm.weight"] = block.ffn_norm.weight
            if isinstance(ffn, MixtureFeedForward):
                changed["ffn.router.weight"] = ffn.router.weight
                if ffn.residual is not None:
                    changed["ffn.residual.weight"] = ffn.residual.weight
        return {name: tensor.detach().clone() for name, tensor in changed.items()}

    def _experts(
        self, ffn: MixtureFeedForward, calibrated: CalibratedLayer
    ) -> tuple[InputStatistics | None, list[Tensor], list[Tensor]]:
        for expert in range(len(ffn.down_EDF)):
            statistics = calibrated.statistics(f"ffn.down_EDF.{expert}")
            if statistics is not None and ffn.bias_EG is None:
                self._both(ffn.gate_up_EGD[expert], ffn.down_EDF[expert], statistics)
        others: list[Tensor] = [ffn.router.weight]
        readers: list[Tensor] = list(ffn.gate_up_EGD)
        if ffn.shared is not None:
            self._rows(ffn.shared, calibrated.statistics("ffn.shared.down.weight"))
            readers.append(ffn.shared.gate_up.weight)
        if ffn.shared_gate is not None:
            readers.append(ffn.shared_gate.weight)
        if ffn.residual is not None:
            others.append(ffn.residual.weight)
        return calibrated.all_inputs(), readers, others

    def _rows(self, ffn: DenseFeedForward, statistics: InputStatistics | None) -> None:
        if statistics is not None and ffn.gate_up.bias is None:
            self._both(ffn.gate_up.weight, ffn.down.weight, statistics)

    def _both(self, gate_up_GD: Tensor, down_DF: Tensor, statistics: InputStatistics) -> None:
        """Scale the inputs of `down`, and the rows of `up` that make them the other way."""
        scale_F = self._best([down_DF], statistics)
        down_DF.mul_(scale_F)
        gate_up_GD[len(scale_F) :].div_(scale_F[:, None])

    def _spread(self, norm: Norm, readers: list[Tensor], others: list[Tensor], statistics: InputStatistics) -> None:
        scale_D = self._best(readers, statistics)
        norm.weight.copy_((norm.weight + norm.offset) / scale_D - norm.offset)
        for weight_OD in readers + others:
            weight_OD.mul_(scale_D)

    def _best(self, readers: list[Tensor], statistics: InputStatistics) -> Tensor:
        """The scale, a power of the inputs' mean size, with the least error at the output."""
        grid, size_I = self._grid(), statistics.size_I.clamp(min=1e-6)
        best, best_I = float("inf"), torch.ones_like(size_I)
        tried = readers[:: max(1, len(readers) // 4)]  # a few experts stand for all
        for step in range(STEPS):
            scale_I = size_I.pow(step / STEPS)
            scale_I = (scale_I / (scale_I.max() * scale_I.min()).sqrt()).clamp(1e-4, 1e4)
            error = 0.0
            for weight_OI in tried:
                rounded_OI = grid.rounded(weight_OI * scale_I) / scale_I
                error += statistics.error(weight_OI, rounded_OI)
            if error < best:
                best, best_I = error, scale_I
        return best_I
