"""Matrices of 8-bit or 4-bit floating-point numbers with scales: FP8 (e4m3), MXFP4 and NVFP4 (e2m1).

A weight is its number times its group's scale. FP8 has a scale for a tensor, for each output, or for each block of 128
by 128; MXFP4 a power of two for 32 inputs; NVFP4 an e4m3 number for 16 inputs, all of which are divided by one global
scale. Here scales are kept for every output, however many share them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.errors import UserError
from moesaic.model.formats import float4

FloatName = Literal["fp8_tensor", "fp8_channel", "fp8_block", "mxfp4", "nvfp4"]
LARGEST_E4M3 = 448.0
SPANS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)  # of the largest weight; what lies beyond is clipped


@dataclass(frozen=True)
class FloatFormat:
    bits: int
    group: int  # inputs that share a scale; 0: all
    rows: int  # outputs that share a scale; 0: all
    largest: float  # number

    def group_of(self, inputs: int) -> int:
        return self.group or inputs

    def nearest(self, x: Tensor) -> Tensor:
        """The number nearest to each."""
        if self.bits == 8:
            return x.clamp(-self.largest, self.largest).to(torch.float8_e4m3fn).float()
        return float4.numbers(float4.nearest(x))


FLOAT_FORMATS: dict[str, FloatFormat] = {
    "fp8_tensor": FloatFormat(8, 0, 0, LARGEST_E4M3),
    "fp8_channel": FloatFormat(8, 0, 1, LARGEST_E4M3),
    "fp8_block": FloatFormat(8, 128, 128, LARGEST_E4M3),
    "mxfp4": FloatFormat(4, 32, 1, float4.LARGEST),
    "nvfp4": FloatFormat(4, 16, 1, float4.LARGEST),
}


@dataclass(frozen=True)
class FloatMatrix:
    """`stored` holds numbers: e4m3 (O, I), or e2m1 two in a byte (O, I/2). With a global scale the others are e4m3."""

    name: str
    stored: Tensor
    scales_OG: Tensor
    global_scale: Tensor | None = None

    @property
    def format(self) -> FloatFormat:
        return FLOAT_FORMATS[self.name]

    @property
    def shape(self) -> tuple[int, int]:
        outputs, width = self.stored.shape
        return outputs, width * 8 // self.format.bits

    def dense(self) -> Tensor:
        numbers_OI = self.stored.float() if self.format.bits == 8 else float4.numbers(float4.unpack(self.stored))
        return numbers_OI * spread(self.scales_OG, self.global_scale, self.format, self.shape[1])


def spread(scales_OG: Tensor, global_scale: Tensor | None, form: FloatFormat, inputs: int) -> Tensor:
    """The scale of every weight."""
    scales_OG = scales_OG if global_scale is None else scales_OG / global_scale
    return scales_OG.repeat_interleave(form.group_of(inputs), dim=1)[:, :inputs]


def made(name: str, numbers_OI: Tensor, scales_OG: Tensor, global_scale: Tensor | None) -> FloatMatrix:
    """From numbers that are of the format."""
    if FLOAT_FORMATS[name].bits == 8:
        return FloatMatrix(name, numbers_OI.to(torch.float8_e4m3fn), scales_OG, global_scale)
    return FloatMatrix(name, float4.pack(float4.nearest(numbers_OI)), scales_OG, global_scale)


def rounded(
    name: str, weight_OI: Tensor, pieces: Sequence[slice] = (slice(None),), importance_I: Tensor | None = None
) -> FloatMatrix:
    """Each weight to the nearest number. `pieces` are the outputs that are tensors of their own on disk."""
    form = FLOAT_FORMATS[name]
    scales_OG, global_scale = fit(name, weight_OI, pieces, importance_I)
    numbers_OI = form.nearest(weight_OI / spread(scales_OG, global_scale, form, weight_OI.shape[1]))
    return made(name, numbers_OI, scales_OG, global_scale)


def fit(
    name: str, weight_OI: Tensor, pieces: Sequence[slice] = (slice(None),), importance_I: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Scales for each output's groups, as the format can hold them, and the global scale of NVFP4."""
    form, inputs = FLOAT_FORMATS[name], weight_OI.shape[1]
    if form.bits == 8:
        return torch.cat([_largest_of(weight_OI[rows], form) for rows in pieces]) / form.largest, None
    if inputs % form.group:
        problem = f"has groups of {form.group}, and a matrix of this model has {inputs} inputs"
        raise UserError(name, problem, "Take another format, such as fp8_channel.")
    grouped_OGX = weight_OI.unflatten(1, (-1, form.group))
    counted_GX = torch.ones_like(grouped_OGX[0]) if importance_I is None else importance_I.view(-1, form.group)
    largest_OG = grouped_OGX.abs().amax(-1)
    if name == "mxfp4":
        # Either the group's largest weight lies within the numbers, or more of it is clipped and the rest is finer.
        stored_OG = torch.frexp(largest_OG / form.largest).exponent.clamp(-120, 120) + 127
        tried = [float4.powers(stored_OG - down) for down in (0, 1)]
        return _least(grouped_OGX, counted_GX, tried, None, form), None
    global_scale = LARGEST_E4M3 * form.largest / weight_OI.abs().max().clamp(min=1e-20)
    tried = [_e4m3(largest_OG * span / form.largest * global_scale) for span in SPANS]
    return _least(grouped_OGX, counted_GX, tried, global_scale, form), global_scale


def _largest_of(weight_OI: Tensor, form: FloatFormat) -> Tensor:
    """Of each block, for every output in it."""
    outputs, inputs = weight_OI.shape
    high, wide = form.rows or outputs, form.group_of(inputs)
    blocks = F.pad(weight_OI.abs(), (0, -inputs % wide, 0, -outputs % high))
    largest = blocks.unflatten(1, (-1, wide)).unflatten(0, (-1, high)).amax((1, 3)).clamp(min=1e-20)
    return largest.repeat_interleave(high, dim=0)[:outputs]


def _e4m3(scales: Tensor) -> Tensor:
    rounded = scales.clamp(max=LARGEST_E4M3).to(torch.float8_e4m3fn).float()
    return torch.where(rounded > 0, rounded, 2.0**-9)  # its least number


def _least(
    grouped_OGX: Tensor, counted_GX: Tensor, tried: list[Tensor], global_scale: Tensor | None, form: FloatFormat
) -> Tensor:
    """For each group the scales with the least squared error."""
    best_OG, least_OG = tried[0], torch.full_like(tried[0], float("inf"))
    for scales_OG in tried:
        step = (scales_OG if global_scale is None else scales_OG / global_scale)[..., None]
        off_OGX = form.nearest(grouped_OGX / step) * step - grouped_OGX
        error_OG = (off_OGX.square() * counted_GX).sum(-1)
        better_OG = error_OG < least_OG
        best_OG, least_OG = torch.where(better_OG, scales_OG, best_OG), torch.where(better_OG, error_OG, least_OG)
    return best_OG
