"""Quantized weights as they lie in a GPU's memory.

Codes have 4 or 8 bits, whatever they had on disk. With 4, a byte holds two inputs that are `half_width` apart, so that
the low parts of neighbouring bytes are neighbouring inputs and the high parts the next ones: nothing is shuffled after
reading. The words of 64 bytes lie as the columns of a square of them: of 16 bytes in a row each word belongs to
another 16 inputs, so that four threads that have read 64 bytes together hold what tensor cores take from them, a word
of each for every 16 inputs in a row (`registers.py`).

A group's scale multiplies the exact sum of its codes times the inputs, in float32, so that nothing but the
inputs is rounded to bf16.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.kernels.quantized import QuantizedMatrix, QuantizedWeight, unpack

ZERO_POINT = {4: 8, 8: 128}  # by bits: what is taken from a code before it multiplies


class PackedWeight(QuantizedWeight):
    """(E, O, I) or, with one expert only that is none, (O, I)."""

    codes_EOB: Tensor
    scales_EGO: Tensor
    zeros_EGO: Tensor | None  # added to the zero point

    def __init__(self, matrices: list[QuantizedMatrix], dtype: torch.dtype, stacked: bool) -> None:
        super().__init__()
        first = matrices[0]
        self.dtype, self.group, self.inputs = dtype, first.group, first.shape[1]
        self.bits = 4 if max(matrix.bits for matrix in matrices) <= 4 else 8
        self.half_width = half_of(self.inputs, self.group)
        self.shape = torch.Size((len(matrices), *first.shape) if stacked else first.shape)
        zero_point = ZERO_POINT[self.bits]
        zeros = any(matrix.zeros_XGO is not None for matrix in matrices)
        codes, offsets = [], []
        for matrix in matrices:
            own = 2 ** (matrix.bits - 1)  # its zero point, which becomes that of all
            codes_OI = unpack(matrix.codes, matrix.bits)[:, : self.inputs] + (zero_point - own)
            codes.append(packed(codes_OI, self.bits, self.half_width, zero_point))
            offsets.append(torch.zeros_like(matrix.scales_GO) if matrix.zeros_GO is None else matrix.zeros_GO - own)
        self.register_buffer("codes_EOB", torch.stack(codes))
        self.register_buffer("scales_EGO", halved(torch.stack([matrix.scales_GO for matrix in matrices])))
        self.register_buffer("zeros_EGO", halved(torch.stack(offsets)) if zeros else None)

    @property
    def device(self) -> torch.device:
        return self.codes_EOB.device

    def dense(self) -> Tensor:
        """The matrices it stands for, in float32."""
        codes_EOI = (
            unpacked(self.codes_EOB, self.bits, self.half_width)[..., : self.inputs].float() - ZERO_POINT[self.bits]
        )
        if self.zeros_EGO is not None:
            codes_EOI = codes_EOI - self._spread(self.zeros_EGO.float())
        return (codes_EOI * self._spread(self.scales_EGO.float())).view(self.shape)

    def _spread(self, of_EGO: Tensor) -> Tensor:
        return of_EGO.transpose(1, 2).repeat_interleave(self.group, dim=2)[..., : self.inputs]

    def extra_repr(self) -> str:
        return f"{'x'.join(map(str, self.shape))}, {self.bits} bits, groups of {self.group}"


def halved(of_EGO: Tensor) -> Tensor:
    """In half precision where that loses nothing, as with all that was stored so."""
    half_EGO = of_EGO.half()
    return half_EGO if torch.equal(half_EGO.float(), of_EGO.float()) else of_EGO.float()


def half_of(inputs: int, group: int) -> int:
    """How far apart inputs are that share a byte; no more of them than belong to one group."""
    return 64 if group % 64 == 0 and inputs % 128 == 0 else 32


def packed(codes_OI: Tensor, bits: int, half: int, zero_point: int) -> Tensor:
    """What fills up the last bytes multiplies nothing: the kernels read no inputs there."""
    beyond = -codes_OI.shape[1] % (2 * half)
    codes_OI = F.pad(codes_OI.to(torch.uint8), (0, beyond), value=zero_point)
    if bits == 8:
        return transposed_words(codes_OI.unflatten(1, (-1, half))).flatten(1)
    pairs_OC2H = codes_OI.unflatten(1, (-1, 2, half))
    return transposed_words(pairs_OC2H[:, :, 0] | pairs_OC2H[:, :, 1] << 4).flatten(1)


def transposed_words(bytes_XH: Tensor) -> Tensor:
    """Rows of words as columns, and again as rows: sixteen words are a square, eight stay as they are."""
    if bytes_XH.shape[-1] != 64:
        return bytes_XH
    return bytes_XH.unflatten(-1, (4, 4, 4)).transpose(-3, -2).flatten(-3)


def unpacked(codes_EOB: Tensor, bits: int, half: int) -> Tensor:
    bytes_EOCH = transposed_words(codes_EOB.unflatten(2, (-1, half)))
    if bits == 8:
        return bytes_EOCH.flatten(2)
    return torch.stack([bytes_EOCH & 15, bytes_EOCH >> 4], dim=3).flatten(2)
