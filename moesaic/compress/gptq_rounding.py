"""GPTQ's rounding (Frantar et al. 2022): one input after the other, those still to come making up for each error.

With the second moments H of what flows into a matrix, an error e made at input i is best undone by moving the inputs
that are left along row i of the inverse of H. Inputs with large moments are rounded first, while most are left to
correct them; the steps of each group are fixed before, so that this order costs no index at run time. Then codes and
steps are refined in turns (`compress/refine.py`).

Moments of a few thousand tokens are not those of all text: what fits them best fits others worse. Damping makes up for
it; how much is tried on a part of the tokens that is not counted, for each matrix.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import repeat

import torch
from torch import Tensor

from moesaic.compress.calibration_statistics import InputStatistics
from moesaic.compress.refine import Steps, refined, squared_error
from moesaic.kernels.grid import Grid
from moesaic.kernels.quantized import QuantizedMatrix

AT_ONCE = 64  # inputs whose corrections are applied to the rest in one matmul
TURNS = 3
DAMPINGS = (0.03, 0.1, 0.3, 1.0, 3.0)  # of the mean of the diagonal
TRIED_ON = 64  # outputs
MIN_TOKENS = 32  # to set some aside


@dataclass
class Piece:
    """Some of the outputs of a matrix, rounded for their own moments (damped)."""

    rows: slice
    moments_II: Tensor
    codes_OI: Tensor
    steps: Steps


def gptq(
    weight_OI: Tensor, statistics: InputStatistics, grid: Grid, damping: float = 0.0, turns: int = TURNS
) -> QuantizedMatrix:
    return joined(grid, pieces(weight_OI, statistics, grid, damping, turns))


def pieces(
    weight_OI: Tensor, statistics: InputStatistics, grid: Grid, damping: float = 0.0, turns: int = TURNS
) -> list[Piece]:
    made = []
    dampings = repeat(damping) if damping else steady_dampings(weight_OI, statistics, grid)
    for (rows, moments_II), share in zip(statistics.parts(len(weight_OI)), dampings, strict=False):
        moments_II = damped(moments_II, share)
        made.append(Piece(rows, moments_II, *rounded(weight_OI[rows], moments_II, grid, turns)))
    return made


def rounded(weight_OI: Tensor, moments_II: Tensor, grid: Grid, turns: int) -> tuple[Tensor, Steps]:
    steps = grid.fit(weight_OI, moments_II.diagonal())
    return refined(weight_OI, moments_II, grid, gptq_codes(weight_OI, moments_II, grid, *steps), steps, turns)


def joined(grid: Grid, made: list[Piece]) -> QuantizedMatrix:
    scales = torch.cat([piece.steps[0] for piece in made])
    zeros = [piece.steps[1] for piece in made if piece.steps[1] is not None]
    return grid.made(torch.cat([piece.codes_OI for piece in made]), scales, torch.cat(zeros) if zeros else None)


def damped(moments_II: Tensor, share: float) -> Tensor:
    mean = moments_II.diagonal().mean().clamp(min=1e-8)
    return moments_II + share * mean * torch.eye(len(moments_II), device=moments_II.device)


def steady_dampings(weight_OI: Tensor, statistics: InputStatistics, grid: Grid) -> Iterator[float]:
    """For each part of the outputs what loses least on tokens set aside, where some of the outputs are rounded with the
    moments of the others. Rounding among others alone tells dampings apart, and needs no inverse."""
    if len(statistics.rows_TI) < MIN_TOKENS:
        yield from repeat(DAMPINGS[-1])  # they say little
        return
    most, rest = statistics.split()
    for (rows, moments_II), (_, aside_II) in zip(most.parts(len(weight_OI)), rest.parts(len(weight_OI)), strict=True):
        some_OI = weight_OI[rows][:: max(1, (rows.stop - rows.start) // TRIED_ON)]
        losses = []
        for share in DAMPINGS:
            tried_II = damped(moments_II, share)
            steps = grid.fit(some_OI, tried_II.diagonal())
            codes_OI, steps = refined(some_OI, tried_II, grid, grid.codes(some_OI, *steps), steps, 1)
            losses.append(squared_error(some_OI, aside_II, grid, codes_OI, steps))
        yield DAMPINGS[losses.index(min(losses))]


def gptq_codes(
    weight_OI: Tensor,
    moments_II: Tensor,
    grid: Grid,
    scales_OG: Tensor,
    zeros_OG: Tensor | None,
    kept_OI: Tensor | None = None,
) -> Tensor:
    """The codes, one per weight; where `kept` is false a weight becomes zero (for sparse matrices)."""
    inputs = weight_OI.shape[1]
    zeros_OI = float(2 ** (grid.bits - 1)) if zeros_OG is None else grid.spread(zeros_OG, inputs)
    zeros_OI = torch.as_tensor(zeros_OI, device=weight_OI.device).expand(weight_OI.shape)
    order_I = moments_II.diagonal().argsort(descending=True, stable=True)
    left_OI = weight_OI[:, order_I].clone()
    scales_OI, zeros_OI = grid.spread(scales_OG, inputs)[:, order_I], zeros_OI[:, order_I]
    kept_OI = None if kept_OI is None else kept_OI[:, order_I]
    upper_II = inverse_factor(moments_II[order_I][:, order_I])
    codes_OI = torch.empty_like(left_OI)
    for start in range(0, inputs, AT_ONCE):
        stop = min(start + AT_ONCE, inputs)
        errors = corrected(left_OI, scales_OI, zeros_OI, kept_OI, upper_II, codes_OI, start, stop, grid.top)
        left_OI[:, stop:].addmm_(errors, upper_II[start:stop, stop:], alpha=-1)
    out_OI = torch.empty_like(codes_OI)
    out_OI[:, order_I] = codes_OI
    return out_OI


def corrected(
    left_OI: Tensor,
    scales_OI: Tensor,
    zeros_OI: Tensor,
    kept_OI: Tensor | None,
    upper_II: Tensor,
    codes_OI: Tensor,
    start: int,
    stop: int,
    top: int,
) -> Tensor:
    """Codes of inputs `start` to `stop`, with their errors made up for among themselves; returns the errors."""
    if left_OI.is_cuda:
        from moesaic.kernels.triton.quantized import rounding

        return rounding.corrected(left_OI, scales_OI, zeros_OI, kept_OI, upper_II, codes_OI, start, stop, top)
    errors = torch.empty_like(left_OI[:, start:stop])
    for i in range(start, stop):
        column_O = left_OI[:, i]
        code_O = (column_O / scales_OI[:, i] + zeros_OI[:, i]).round_().clamp_(0, top)
        if kept_OI is not None:
            code_O = torch.where(kept_OI[:, i], code_O, zeros_OI[:, i])
        codes_OI[:, i] = code_O
        error_O = (column_O - (code_O - zeros_OI[:, i]) * scales_OI[:, i]) / upper_II[i, i]
        left_OI[:, i:stop].addr_(error_O, upper_II[i, i:stop], alpha=-1)
        errors[:, i - start] = error_O
    return errors


def inverse_factor(moments_II: Tensor) -> Tensor:
    """The upper Cholesky factor of the inverse, with as much more damping as it takes."""
    more = 0.0
    while True:
        lower_II, failed = torch.linalg.cholesky_ex(damped(moments_II, more).double())
        if not failed:
            inverse_II = torch.cholesky_inverse(lower_II)
            upper_II, failed = torch.linalg.cholesky_ex(inverse_II, upper=True)
            if not failed:
                return upper_II.float().contiguous()
        more = more * 10 or 1e-3
