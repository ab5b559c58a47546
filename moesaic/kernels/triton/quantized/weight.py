"""A quantized weight on a GPU: the model's `QuantizedWeight`, by the kernels of serving."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moesaic.kernels.quantized import QuantizedMatrix, QuantizedWeight
from moesaic.kernels.triton.embedding import embed
from moesaic.kernels.triton.quantized import matmul
from moesaic.kernels.triton.quantized.packed_weight import PackedWeight


class GpuQuantizedWeight(PackedWeight):
    def rows(self, chosen: Tensor) -> Tensor:
        return embed(chosen.flatten(), None, None, self).view(*chosen.shape, self.inputs)

    def linear(self, x_TI: Tensor, bias_O: Tensor | None = None) -> Tensor:
        flat_TI = x_TI.reshape(-1, x_TI.shape[-1]).to(self.dtype)
        return matmul.linear(flat_TI, self, bias_O).view(*x_TI.shape[:-1], self.shape[-2])


def gpu_weight(
    matrix: QuantizedMatrix | nn.ModuleList, dtype: torch.dtype, activation: str = "silu"
) -> QuantizedWeight | nn.ModuleList | Tensor:
    """A quantized matrix, or those of a layer's experts, as the GPU's kernels take them.

    Those with corrections of low rank, and experts with another activation or in groups of different sizes, become
    plain matrices: right, and no slower than those were. What rounds its inputs too stays, for kernels that do.
    """
    stacked = isinstance(matrix, nn.ModuleList)
    matrices: list[QuantizedMatrix] = list(matrix) if isinstance(matrix, nn.ModuleList) else [matrix]  # type: ignore[arg-type]
    if any(one.activation_bits == 8 for one in matrices):
        return matrix
    alike = len({one.group for one in matrices}) == 1 and (activation == "silu" or not stacked)
    if any(one.up_OR is not None for one in matrices) or not alike:
        dense = [one.dense().to(dtype) for one in matrices]
        return torch.stack(dense) if stacked else dense[0]
    return GpuQuantizedWeight(matrices, dtype, stacked)
