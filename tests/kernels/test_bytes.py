"""Panels of 8 bits (native/bytes.c) beside the tiles that every processor takes (native/quantized.c)."""

from __future__ import annotations

import ctypes

import pytest
import torch

from moesaic.kernels import native
from moesaic.kernels.grid import Grid
from moesaic.kernels.native.quantized_fused_layers import as_matrix
from moesaic.kernels.quantized import QuantizedKernels


class Rounded(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("values", "scales", "sums", "wholes")]


@torch.inference_mode()
@pytest.mark.parametrize(("inputs", "outputs"), [(384, 1152), (100, 70), (33, 8), (1536, 64)])
def test_panels_have_the_numbers_of_tiles_to_the_bit(inputs, outputs):
    kernels = native.kernels()
    assert kernels is not None
    torch.manual_seed(inputs)
    weight = Grid(8, 0, activation_bits=8).matrix(torch.randn(outputs, inputs))
    matrix, library = as_matrix(weight), kernels.library
    room = library.bytes_room(ctypes.byref(matrix))
    if not room:
        pytest.skip("this processor has no VNNI: its encoders keep tiles")
    panels = torch.full((room,), 255, dtype=torch.uint8)
    library.pack_bytes(ctypes.byref(matrix), panels.data_ptr())
    matrix.codes = panels.data_ptr()
    bias_O = torch.randn(outputs)
    for rows in (1, 2, 5, 6, 13, 19):
        x_TI = torch.randn(rows, inputs) * torch.tensor([10.0 ** (row % 5 - 2) for row in range(rows)])[:, None]
        x_TI[-1, 0] = 50 * x_TI[-1].abs().max()  # alone at the end of its row's scale
        values = torch.full((rows, matrix.padded), 77, dtype=torch.int8)
        held = [values, torch.empty(rows), torch.empty(rows), torch.empty(rows, dtype=torch.int32)]
        rounded = Rounded(*(tensor.data_ptr() for tensor in held))
        for row in range(rows):
            library.round_bytes(
                ctypes.c_void_p(x_TI[row].data_ptr()), ctypes.byref(matrix), ctypes.byref(rounded), ctypes.c_long(row)
            )
        y_TO = torch.full((rows, outputs), float("nan"))
        library.bytes_matmul(
            ctypes.byref(matrix), ctypes.byref(rounded), ctypes.c_void_p(bias_O.data_ptr()),
            ctypes.c_void_p(y_TO.data_ptr()), ctypes.c_long(rows),
        )  # fmt: skip
        expected_TO = QuantizedKernels(kernels).linear(x_TI, weight, bias_O)
        assert torch.equal(y_TO, expected_TO)
        assert (values[:, inputs:] == 0).all() and values.min() >= -128 and y_TO.abs().max() > 0
    zeros = torch.zeros(1, inputs)
    library.round_bytes(
        ctypes.c_void_p(zeros.data_ptr()), ctypes.byref(matrix), ctypes.byref(rounded), ctypes.c_long(0)
    )
    assert held[1][0] == 0 and not held[0][0].any()
