"""Which numbers a method rounds to: integers, or the floating-point formats of `model/formats/float_matrix.py`."""

from __future__ import annotations

from typing import Literal

from moesaic.kernels.grid import Grid

NumberFormat = Literal["int", "fp8_tensor", "fp8_channel", "fp8_block", "mxfp4", "nvfp4"]


def layouts_of(number_format: NumberFormat, grid: Grid) -> tuple[str, ...]:
    """The layouts that can hold a model of such numbers."""
    if number_format == "fp8_block":
        return ("compressed-tensors", "fp8")
    if number_format != "int":
        return ("compressed-tensors",)
    glm = grid.bits in (4, 8) and grid.symmetric and not grid.group
    return ("moesaic", "compressed-tensors", *(("glm-int",) if glm else ()))
