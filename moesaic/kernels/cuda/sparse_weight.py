"""A matrix of which two in every four inputs are zero, on the sparse tensor cores of a GPU (cuSPARSELt, which comes
with torch): half the multiplications, and 9/16 of the bytes.

How its sums are added up is the library's choice for each number of rows, so a row may have other last bits in another
batch: kernels that promise the same bits do not take such weights. Where there are no sparse tensor cores the zeros
are kept and multiplied by: the meaning, and nothing gained.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.kernels.quantized import QuantizedWeight

OUTPUTS = INPUTS = 16  # what the library takes are multiples of these
ROWS = 8  # and of these; rows of zeros fill up
HALF = (torch.bfloat16, torch.float16)


class SparseWeight(QuantizedWeight):
    """(O, I)."""

    packed: Tensor  # the inputs that stay and which they are, as the library lays them out; on a CPU the matrix

    def __init__(self, weight_OI: Tensor, algorithm: int = 0) -> None:
        super().__init__()
        assert is_two_of_four(weight_OI), "more than two in four inputs are not zero"
        self.shape, self.dtype, self.algorithm = weight_OI.shape, weight_OI.dtype, algorithm
        own_OI = weight_OI.detach().contiguous()
        self.register_buffer("packed", torch._cslt_compress(own_OI) if own_OI.is_cuda else own_OI.clone())

    @property
    def device(self) -> torch.device:
        return self.packed.device

    def linear(self, x_TI: Tensor, bias_O: Tensor | None = None) -> Tensor:
        flat_TI = x_TI.reshape(-1, x_TI.shape[-1]).to(self.dtype)
        if not self.packed.is_cuda:
            out_TO = F.linear(flat_TI, self.packed, bias_O)
        else:
            rows = len(flat_TI)
            full_TI = F.pad(flat_TI, (0, 0, 0, -rows % ROWS)) if rows % ROWS else flat_TI.contiguous()
            out_TO = torch._cslt_sparse_mm(
                self.packed, full_TI.t(), bias=bias_O, transpose_result=True, alg_id=self.algorithm
            )[:rows]
        return out_TO.reshape(*x_TI.shape[:-1], self.shape[0])

    def dense(self) -> Tensor:
        """What it stands for, zeros included."""
        return self.linear(torch.eye(self.shape[1], device=self.device, dtype=self.dtype)).T.contiguous()

    def extra_repr(self) -> str:
        return f"{self.shape[0]}x{self.shape[1]}, two of four inputs, algorithm {self.algorithm}"


def is_two_of_four(weight_OI: Tensor) -> bool:
    """Whether no four neighbouring inputs have more than two that are not zero."""
    if weight_OI.dim() != 2 or weight_OI.shape[1] % 4:
        return False
    return bool((weight_OI.unflatten(1, (-1, 4)).count_nonzero(dim=-1) <= 2).all())


def fits(weight_OI: Tensor) -> bool:
    """Whether the library takes a matrix of this size and dtype."""
    outputs, inputs = weight_OI.shape
    return weight_OI.dtype in HALF and outputs % OUTPUTS == 0 and inputs % INPUTS == 0


def has_sparse_cores(device: torch.device) -> bool:
    """Whether there are sparse tensor cores (Ampere and later), and the library for them."""
    here = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    return here and torch.backends.cusparselt.is_available()
