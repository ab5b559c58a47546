"""Rounding weights to codes: where the steps of a group lie, and which one each weight goes to."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.kernels.quantized import BITS, BLOCK, QuantizedMatrix, padded

# Steps that span less than the whole range cut off the largest weights and round the others better. From here down.
LEAST_SPAN = {1: 1.0, 2: 0.5, 3: 0.6, 4: 0.75, 5: 0.8, 6: 0.85, 8: 0.95}
SPANS = 12
TERNARY_TURNS = 4


@dataclass(frozen=True)
class Grid:
    """`group` inputs of an output share their steps, all of them where it is 0. Symmetric: zero is in the middle.
    Otherwise it lies where it fits best, also between two steps if it need not be whole. Ternary: of the four codes of
    two bits, those for minus one, nothing and one."""

    bits: int
    group: int
    symmetric: bool = True
    activation_bits: int = 16
    whole_zeros: bool = False
    spans: int = SPANS  # thresholds that are tried; 1: the largest weight is never clipped
    ternary: bool = False

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise ValueError(f"bits must be one of {', '.join(map(str, BITS))}, not {self.bits}")
        if self.group < 0 or self.group % BLOCK:
            raise ValueError(f"group must be a multiple of {BLOCK}, or 0 for a whole channel, not {self.group}")
        if self.activation_bits not in (8, 16):
            raise ValueError(f"activations must be 8 or 16 bits, not {self.activation_bits}")
        if self.ternary and not (self.bits == 2 and self.symmetric):
            raise ValueError("ternary codes are symmetric codes of 2 bits")

    @property
    def top(self) -> int:
        return 2**self.bits - 1

    @property
    def bottom(self) -> int:
        return 1 if self.ternary else 0

    def group_of(self, inputs: int) -> int:
        return min(self.group, padded(inputs)) or padded(inputs)

    def bits_of(self, outputs: int, inputs: int) -> int:
        """On disk, scales and zeros included."""
        groups = -(-inputs // self.group_of(inputs))
        return outputs * (padded(inputs) * self.bits + groups * 16 * (1 if self.has_middle else 2))

    @property
    def has_middle(self) -> bool:
        # With one bit, steps around a middle would be "minus one" and "nothing".
        return self.symmetric and self.bits > 1

    def fit(self, weight_OI: Tensor, importance_I: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Scales and zeros (O, G) with the least squared error, each input's counted by its importance."""
        grouped_OGX = self.grouped(weight_OI)
        counted_GX = torch.ones_like(grouped_OGX[0])
        if importance_I is not None:
            counted_GX = self.grouped(importance_I[None])[0]
        if self.bits == 1:  # XNOR-Net: the mean size, with either sign
            inside_OGX = self.grouped(torch.ones_like(weight_OI[:1]))
            scales_OG = (grouped_OGX.abs().sum(-1) / inside_OGX.sum(-1) * 2).half().float()
            return _usable(scales_OG), torch.full_like(scales_OG, 0.5)
        if self.ternary:
            return _usable(self._ternary_scales(grouped_OGX, counted_GX).half().float()), None
        best_OG = torch.full_like(grouped_OGX[..., 0], float("inf"))
        best_scales_OG, best_zeros_OG = torch.ones_like(best_OG), torch.zeros_like(best_OG)
        for span in torch.linspace(1, LEAST_SPAN[self.bits], self.spans).tolist():
            scales_OG, zeros_OG = self._steps(grouped_OGX, span)
            codes_OGX = self._codes(grouped_OGX, scales_OG, zeros_OG)
            off_OGX = (codes_OGX - zeros_OG[..., None]) * scales_OG[..., None] - grouped_OGX
            error_OG = (off_OGX.square_() * counted_GX).sum(-1)
            better_OG = error_OG < best_OG
            best_OG = torch.where(better_OG, error_OG, best_OG)
            best_scales_OG = torch.where(better_OG, scales_OG, best_scales_OG)
            best_zeros_OG = torch.where(better_OG, zeros_OG, best_zeros_OG)
        return best_scales_OG, None if self.has_middle else best_zeros_OG

    def _ternary_scales(self, grouped_OGX: Tensor, counted_GX: Tensor) -> Tensor:
        """Ternary weight networks (Li et al. 2016): the mean size of those above 0.7 of the mean size of all; then, in
        turns, which those are (what is nearer to one scale than to none) and their mean."""
        size_OGX = grouped_OGX.abs()
        mean_OG1 = (size_OGX * counted_GX).sum(-1, keepdim=True) / counted_GX.sum(-1).clamp(min=1e-20)[:, None]
        large_OGX = size_OGX > 0.7 * mean_OG1
        for _ in range(TERNARY_TURNS):
            weight_OGX = large_OGX * counted_GX
            scales_OG = (size_OGX * weight_OGX).sum(-1) / weight_OGX.sum(-1).clamp(min=1e-20)
            large_OGX = size_OGX > scales_OG[..., None] / 2
        return scales_OG

    def _steps(self, grouped_OGX: Tensor, span: float) -> tuple[Tensor, Tensor]:
        if self.has_middle:
            middle = 2 ** (self.bits - 1)
            scales_OG = _usable((grouped_OGX.abs().amax(-1) * span / (middle - 0.5)).half().float())
            return scales_OG, torch.full_like(scales_OG, middle)
        low_OG, high_OG = grouped_OGX.amin(-1).clamp(max=0) * span, grouped_OGX.amax(-1).clamp(min=0) * span
        scales_OG = _usable(((high_OG - low_OG) / self.top).half().float())
        return scales_OG, (-low_OG / scales_OG).round().clamp(0, self.top)

    def codes(self, weight_OI: Tensor, scales_OG: Tensor, zeros_OG: Tensor | None) -> Tensor:
        if zeros_OG is None:
            zeros_OG = torch.full_like(scales_OG, 2 ** (self.bits - 1))
        return self._codes(self.grouped(weight_OI), scales_OG, zeros_OG).flatten(1)[:, : weight_OI.shape[1]]

    def _codes(self, grouped_OGX: Tensor, scales_OG: Tensor, zeros_OG: Tensor) -> Tensor:
        return (grouped_OGX / scales_OG[..., None] + zeros_OG[..., None]).round_().clamp_(self.bottom, self.top)

    def grouped(self, weight_OI: Tensor) -> Tensor:
        group = self.group_of(weight_OI.shape[1])
        return F.pad(weight_OI, (0, -weight_OI.shape[1] % group)).unflatten(1, (-1, group))

    def spread(self, of_OG: Tensor, inputs: int) -> Tensor:
        """A group's number for each of its inputs, (O, I)."""
        return of_OG.repeat_interleave(self.group_of(inputs), dim=1)[:, :inputs]

    def matrix(
        self, weight_OI: Tensor, steps: tuple[Tensor, Tensor | None] | None = None, importance_I: Tensor | None = None
    ) -> QuantizedMatrix:
        """Each weight to its nearest step."""
        scales_OG, zeros_OG = steps or self.fit(weight_OI, importance_I)
        return self.made(self.codes(weight_OI, scales_OG, zeros_OG), scales_OG, zeros_OG)

    def rounded(self, weight_OI: Tensor, importance_I: Tensor | None = None) -> Tensor:
        """What each weight becomes, without making a matrix of it."""
        scales_OG, zeros_OG = self.fit(weight_OI, importance_I)
        inputs = weight_OI.shape[1]
        zeros_OI = 2 ** (self.bits - 1) if zeros_OG is None else self.spread(zeros_OG, inputs)
        return (self.codes(weight_OI, scales_OG, zeros_OG) - zeros_OI) * self.spread(scales_OG, inputs)

    def made(self, codes_OI: Tensor, scales_OG: Tensor, zeros_OG: Tensor | None) -> QuantizedMatrix:
        group = self.group_of(codes_OI.shape[1])
        return QuantizedMatrix.of(codes_OI, scales_OG, zeros_OG, self.bits, group, self.activation_bits)


def _usable(scales_OG: Tensor) -> Tensor:
    """A group of zeros has no range: any scale will do."""
    return torch.where(scales_OG > 0, scales_OG, 1.0)
