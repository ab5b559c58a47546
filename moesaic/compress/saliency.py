"""Saliency: how much an error at each token changes a layer's output, by which the moments for rounding are weighed.

Nearly every token attends to the first of its sequence, so that an error in that one's value has a hundredfold effect;
counted as one token of many, it is what costs most. This is the saliency of GuidedQuant (Kim et al. 2025), but from the
gradients of the layer's own output instead of the model's, so that one layer is in memory. The output is multiplied by
random signs, and the squares of the gradients that come back to a matrix are, on average, the squares of its whole
effect. Since a norm reads what comes out, a token's effect counts against its size.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from moesaic.compress.calibration_statistics import CalibratedLayer
from moesaic.kernels.interface import Kernels
from moesaic.kernels.wrapped import WrappedKernels
from moesaic.model.attention import GroupedQueryAttention
from moesaic.model.block import Block

EVEN = 0.05  # of the weight is shared out evenly, lest a matrix go by a few tokens alone


class SaliencyKernels(WrappedKernels):
    """Kernels that keep the squares of the gradients that come back to every plain matrix's outputs, by call site."""

    def __init__(self, plain: Kernels, parts: dict[str, list[int]]) -> None:
        super().__init__(plain)
        self._parts = parts
        self.squares: dict[str, list[Tensor]] = {}

    def linear(self, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None, site: str = "") -> Tensor:
        y_TO = self.plain.linear(x_TI, weight_OI, bias_O, site)
        sizes = self._parts.get(site, [weight_OI.shape[0]])

        def back(gradient_TO: Tensor) -> None:
            means = [part.square().mean(1) for part in gradient_TO.split(sizes, dim=1)]
            self.squares.setdefault(site, []).append(torch.stack(means))

        if y_TO.requires_grad:
            y_TO.register_hook(back)
        return y_TO


def output_parts(block: Block) -> dict[str, list[int]]:
    """By the site of a matrix, the sizes of parts of its outputs that count apart: queries (and their gates), keys and
    values."""
    attention = block.attention
    if not isinstance(attention, GroupedQueryAttention):
        return {}
    queries = [attention.heads] * (2 if attention.gated else 1)
    heads = [*queries, attention.kv_heads, attention.kv_heads]
    return {attention.qkv.site: [count * attention.size for count in heads]}


def measure_saliency(block: Block, calibrated: CalibratedLayer) -> None:
    """Adds to `calibrated` the saliency of tokens at the matrices that every token passes."""
    parts = output_parts(block)
    ops = SaliencyKernels(calibrated.plain, parts)
    generator = torch.Generator().manual_seed(0)
    for _, run in calibrated.run(cast(Kernels, ops)):
        with torch.enable_grad():
            out_TD = run(cast(Block, lambda x_TD, context: block(x_TD.clone().requires_grad_(), context)))
            signs_TD = (torch.randint(0, 2, out_TD.shape, generator=generator) * 2 - 1).to(out_TD.device)
            size_T1 = out_TD.detach().square().mean(1, keepdim=True).sqrt().clamp(min=1e-8)
            (out_TD * (signs_TD / size_T1)).sum().backward()
    for key, pieces in ops.squares.items():
        squares_PT = torch.cat(pieces, dim=1)
        means_P1 = squares_PT.mean(1, keepdim=True)
        counts_PT = torch.where(means_P1 > 0, squares_PT / means_P1, 1.0) * (1 - EVEN) + EVEN
        calibrated.saliency[key] = list(zip(parts.get(key, [0]), counts_PT, strict=True))
