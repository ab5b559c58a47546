"""Four-bit floating-point numbers (e2m1) and the 8-bit exponents (e8m0) that MX formats scale them by.

A number has a sign, two bits of exponent and one of mantissa; two lie in a byte, the first in the low bits. Twice a
number is an integer up to 12, so a matrix of them is also one of 5-bit integers, which every kernel here multiplies by.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moesaic.kernels.quantized import QuantizedMatrix

SIZES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
LARGEST = SIZES[-1]
_BETWEEN = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # two neighbours meet here
_SIGN = 8
MXFP4_BITS, MXFP4_GROUP = 5, 32  # as integers


def nearest(x: Tensor) -> Tensor:
    """The index (0 to 15) of the number nearest to each; ties go to the even mantissa."""
    size, found = x.abs(), torch.zeros_like(x, dtype=torch.uint8)
    for place, between in enumerate(_BETWEEN):
        found += size > between if place % 2 == 0 else size >= between
    return found | ((x < 0) & (found > 0)).to(torch.uint8) * _SIGN


def numbers(indices: Tensor) -> Tensor:
    sizes = torch.tensor(SIZES, device=indices.device)
    return torch.cat([sizes, -sizes])[indices.long()]


def pack(indices_OI: Tensor) -> Tensor:
    return indices_OI[:, 0::2] | (indices_OI[:, 1::2] << 4)


def unpack(packed: Tensor) -> Tensor:
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)


def exponents(scales: Tensor) -> Tensor:
    """Powers of two as e8m0."""
    return (scales.float().view(torch.int32) >> 23).to(torch.uint8)


def powers(stored: Tensor) -> Tensor:
    """e8m0 is what float32 has for an exponent."""
    return (stored.int() << 23).view(torch.float32)


def mxfp4_matrix(packed: Tensor, exponents_OG: Tensor, device: torch.device) -> QuantizedMatrix:
    """Of numbers two in a byte (O, I/2) and the exponent of every 32 inputs, to the bit."""
    codes_OI = (numbers(unpack(packed)) * 2 + 2 ** (MXFP4_BITS - 1)).to(torch.uint8)
    scales_OG = powers(exponents_OG) / 2
    return QuantizedMatrix.of(codes_OI.to(device), scales_OG.to(device), None, MXFP4_BITS, MXFP4_GROUP)
