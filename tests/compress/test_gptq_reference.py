"""GPTQ beside the same written plainly in numpy: the inverse of the moments shrinks by elimination, input by input."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from moesaic.compress.gptq_rounding import damped, gptq_codes
from moesaic.kernels.grid import Grid

Array = np.ndarray[Any, Any]


def run_plainly(weight: Array, moments: Array, scales: Array, zeros: Array, top: int, damping: float) -> Array:
    """Optimal brain quantization with one order for all outputs; scales and zeros are given for every weight."""
    left, codes = weight.copy(), np.zeros_like(weight)
    inverse = np.linalg.inv(moments + damping * np.diag(moments).mean() * np.eye(len(moments)))
    for i in np.argsort(-np.diag(moments), kind="stable"):
        codes[:, i] = np.clip(np.round(left[:, i] / scales[:, i] + zeros[:, i]), 0, top)
        error = (left[:, i] - (codes[:, i] - zeros[:, i]) * scales[:, i]) / inverse[i, i]
        left -= np.outer(error, inverse[i])
        inverse = inverse - np.outer(inverse[:, i], inverse[i]) / inverse[i, i]
        inverse[i, i] = 1.0  # this input is settled, and no longer moves
    return codes


@pytest.mark.parametrize("bits, group, symmetric", [(4, 64, False), (3, 32, True), (4, 128, True)])
def test_codes_are_those_of_the_plain_way(bits: int, group: int, symmetric: bool) -> None:
    generator = torch.Generator().manual_seed(bits)
    mixing_II = torch.randn(160, 160, generator=generator) * torch.logspace(-1, 1, 160)
    rows_TI = torch.randn(800, 160, generator=generator) @ mixing_II
    weight_OI = torch.randn(48, 160, generator=generator)
    moments_II = rows_TI.T @ rows_TI / len(rows_TI)
    grid = Grid(bits, group, symmetric)
    scales_OG, zeros_OG = grid.fit(weight_OI, moments_II.diagonal())
    zeros = torch.full_like(scales_OG, 2 ** (bits - 1)) if zeros_OG is None else zeros_OG
    found_OI = gptq_codes(weight_OI, damped(moments_II, 0.01), grid, scales_OG, zeros_OG)
    wanted = run_plainly(
        *(
            array.double().numpy()
            for array in (weight_OI, moments_II, grid.spread(scales_OG, 160), grid.spread(zeros, 160))
        ),
        grid.top,
        0.01,
    )
    # Where float32 and float64 fall on different sides of a half, everything after that input differs a little.
    assert (found_OI.numpy() == wanted).mean() > 0.99
