"""Products with matrices of few bits: packing there and back, against float64, and to the same bits in any batch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from moesaic.kernels import cpu, native
from moesaic.kernels.quantized import BITS, QuantizedKernels, QuantizedMatrix, pack, rounded_to_8_bits, unpack

SHAPES = [(576, 100, 64, False), (1536, 33, 128, True), (48, 7, 32, True), (100, 64, 128, False), (576, 64, 576, False)]


def matrix(bits: int, inputs: int, outputs: int, group: int, zeros: bool, activation_bits: int = 16) -> QuantizedMatrix:
    codes_OI = torch.randint(0, 2**bits, (outputs, inputs), dtype=torch.uint8)
    groups = -(-inputs // group)
    zeros_OG = torch.rand(outputs, groups) * 2**bits if zeros else None
    return QuantizedMatrix.of(codes_OI, torch.rand(outputs, groups) + 0.1, zeros_OG, bits, group, activation_bits)


@pytest.mark.parametrize("bits", BITS)
def test_packing_there_and_back(bits: int) -> None:
    codes_OI = torch.randint(0, 2**bits, (5, 77), dtype=torch.uint8)
    packed = pack(codes_OI, bits)
    assert packed.shape == (5, 96 * bits // 8)
    assert torch.equal(unpack(packed, bits)[:, :77], codes_OI)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("inputs, outputs, group, zeros", SHAPES)
@torch.inference_mode()
def test_products(bits: int, inputs: int, outputs: int, group: int, zeros: bool, compiled: bool) -> None:
    plain = native.kernels() if compiled else cpu
    if plain is None:
        pytest.skip("no C compiler")
    kernels = QuantizedKernels(plain)  # type: ignore[arg-type]
    x_TI, bias_O = torch.randn(7, inputs) * torch.logspace(-2, 2, inputs), torch.randn(outputs)
    fine = matrix(bits, inputs, outputs, group, zeros)
    wanted_TO = F.linear(x_TI.double(), fine.dense().double(), bias_O.double()).float()
    found_TO = kernels.linear(x_TI, fine, bias_O)
    assert (found_TO - wanted_TO).norm() / wanted_TO.norm() < 2e-4
    for row in range(7):  # one at a time it has the same bits
        assert torch.equal(kernels.linear(x_TI[row : row + 1], fine, bias_O)[0], found_TO[row]) or not compiled
    coarse = matrix(bits, inputs, outputs, group, zeros, activation_bits=8)
    wanted_TO = F.linear(rounded_to_8_bits(x_TI), coarse.dense())
    assert (kernels.linear(x_TI, coarse) - wanted_TO).norm() / wanted_TO.norm() < 1e-4


@torch.inference_mode()
def test_a_row_of_zeros_and_a_correction() -> None:
    kernels = QuantizedKernels(native.kernels() or cpu)  # type: ignore[arg-type]
    large = matrix(3, 96, 40, 32, True)
    large.down_RI, large.up_OR = matrix(8, 96, 5, 64, False), matrix(8, 5, 40, 64, False)
    x_TI = torch.randn(3, 96)
    x_TI[1] = 0
    found_TO = kernels.linear(x_TI, large)
    wanted_TO = F.linear(x_TI.double(), large.dense().double()).float()
    assert torch.equal(found_TO[1], torch.zeros(40))
    assert (found_TO - wanted_TO).norm() / wanted_TO.norm() < 5e-4
