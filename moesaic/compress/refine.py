"""Codes made better where they are: each weight anew among all others, and the steps fitted to the codes, in turns.

The error of a matrix, e @ moments @ e for every output, is quadratic in the weights. With the codes given, the scales
and zeros that make it least solve a small linear system for each output. With those given, one input after the other is
rounded anew to where the error is least while all others stay (QuantEase, Behdin et al. 2023). Neither can make it
larger, but for scales and zeros being kept in half precision.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.kernels.grid import Grid

AT_ONCE = 64  # inputs whose changes are applied to the rest in one matmul
OUTPUTS = 256  # that are solved for together
Steps = tuple[Tensor, Tensor | None]  # scales and zeros (O, G)


def refined(
    weight_OI: Tensor, moments_II: Tensor, grid: Grid, codes_OI: Tensor, steps: Steps, turns: int
) -> tuple[Tensor, Steps]:
    best, least = (codes_OI, steps), squared_error(weight_OI, moments_II, grid, codes_OI, steps)
    for _ in range(turns):
        steps = fitted_steps(weight_OI, moments_II, grid, codes_OI, steps)
        codes_OI = rounded_among_others(weight_OI, moments_II, grid, codes_OI, steps)
        error = squared_error(weight_OI, moments_II, grid, codes_OI, steps)
        if not error < least:
            break
        best, least = (codes_OI, steps), error
    return best


def squared_error(weight_OI: Tensor, moments_II: Tensor, grid: Grid, codes_OI: Tensor, steps: Steps) -> float:
    off_OI = weights_of(grid, codes_OI, steps) - weight_OI
    return float((off_OI @ moments_II * off_OI).sum())


def weights_of(grid: Grid, codes_OI: Tensor, steps: Steps) -> Tensor:
    scales_OI, zeros_OI = _spread(grid, steps, codes_OI)
    return (codes_OI - zeros_OI) * scales_OI


def fitted_steps(weight_OI: Tensor, moments_II: Tensor, grid: Grid, codes_OI: Tensor, steps: Steps) -> Steps:
    """Scales and, where they may be fractions, zeros with the least error for these codes."""
    scales_OG, zeros_OG = steps
    inputs = weight_OI.shape[1]
    group, groups = grid.group_of(inputs), scales_OG.shape[1]
    beyond = groups * group - inputs
    moments_GXI = F.pad(moments_II, (0, beyond, 0, beyond)).unflatten(0, (groups, group))
    # A weight is scale * code + shift; where the zero stays, scale * (code - zero) alone.
    free = zeros_OG is not None and not grid.whole_zeros
    basis_OI = codes_OI if free else codes_OI - _spread(grid, steps, weight_OI)[1]
    basis_OGX = F.pad(basis_OI, (0, beyond)).unflatten(1, (groups, group))
    inside_GX = F.pad(torch.ones_like(weight_OI[0]), (0, beyond)).unflatten(0, (groups, group))
    wanted_OGX = F.pad(weight_OI @ moments_II, (0, beyond)).unflatten(1, (groups, group))
    between_GG = torch.einsum("gx,gxhy,hy->gh", inside_GX, moments_GXI.unflatten(2, (groups, group)), inside_GX)
    new_scales, new_zeros = torch.empty_like(scales_OG), torch.empty_like(scales_OG)
    for start in range(0, len(weight_OI), OUTPUTS):
        rows = slice(start, start + OUTPUTS)
        basis = basis_OGX[rows]
        moved_GIO = torch.bmm(moments_GXI.transpose(1, 2), basis.permute(1, 2, 0))
        moved_GHYO = moved_GIO.unflatten(1, (groups, group))
        system = torch.einsum("ohy,ghyo->ogh", basis, moved_GHYO)
        goal = (basis * wanted_OGX[rows]).sum(2)
        if free:
            mixed_OGH = torch.einsum("hy,ghyo->ogh", inside_GX, moved_GHYO)
            shifts = between_GG.expand(len(basis), -1, -1)
            system = torch.cat(
                [torch.cat([system, mixed_OGH], 2), torch.cat([mixed_OGH.transpose(1, 2), shifts], 2)], 1
            )
            goal = torch.cat([goal, (inside_GX * wanted_OGX[rows]).sum(2)], 1)
        system = system.double()
        # A group whose codes are all alike says nothing of its scale: a little weight keeps the system solvable.
        system.diagonal(dim1=1, dim2=2).mul_(1 + 1e-6).add_(1e-12)
        found = torch.linalg.solve(system, goal.double().unsqueeze(2)).squeeze(2).float()
        new_scales[rows] = found[:, :groups]
        new_zeros[rows] = -found[:, groups:] / found[:, :groups] if free else 0.0
    sound = (new_scales > 0) & new_scales.isfinite() & new_zeros.isfinite() & (new_zeros.abs() < 2 * grid.top + 2)
    scales = torch.where(sound, new_scales, scales_OG).half().float()
    zeros = zeros_OG if zeros_OG is None or not free else torch.where(sound, new_zeros, zeros_OG).half().float()
    usable = scales > 0  # half precision has a least number
    return torch.where(usable, scales, scales_OG), zeros


def rounded_among_others(weight_OI: Tensor, moments_II: Tensor, grid: Grid, codes_OI: Tensor, steps: Steps) -> Tensor:
    order_I = moments_II.diagonal().argsort(descending=True, stable=True)
    # Inputs come first here: what one step reads and writes then lies together.
    scales_IO, zeros_IO = (of_OI.T[order_I].contiguous() for of_OI in _spread(grid, steps, weight_OI))
    codes_IO, moments_II = codes_OI.T[order_I].contiguous(), moments_II[order_I][:, order_I]
    pull_IO = moments_II @ (weight_OI.T[order_I] - (codes_IO - zeros_IO) * scales_IO)  # where each input would move
    per_code_IO = 1 / (moments_II.diagonal().clamp(min=1e-20)[:, None] * scales_IO)
    for start in range(0, len(order_I), AT_ONCE):
        stop = min(start + AT_ONCE, len(order_I))
        moves = among_others(pull_IO, codes_IO, scales_IO, per_code_IO, moments_II, start, stop, grid.top)
        pull_IO.addmm_(moments_II[:, start:stop], moves, alpha=-1)
    out_IO = torch.empty_like(codes_IO)
    out_IO[order_I] = codes_IO
    return out_IO.T.contiguous()


def among_others(
    pull_IO: Tensor,
    codes_IO: Tensor,
    scales_IO: Tensor,
    per_code_IO: Tensor,
    moments_II: Tensor,
    start: int,
    stop: int,
    top: int,
) -> Tensor:
    """Codes of inputs `start` to `stop` anew, one after the other; returns how far their weights moved."""
    if pull_IO.is_cuda:
        from moesaic.kernels.triton.quantized import rounding

        return rounding.among_others(pull_IO, codes_IO, scales_IO, per_code_IO, moments_II, start, stop, top)
    pull, moves = pull_IO[start:stop].clone(), torch.empty_like(pull_IO[start:stop])
    for place, i in enumerate(range(start, stop)):
        new_O = torch.addcmul(codes_IO[i], pull[place], per_code_IO[i]).round_().clamp_(0, top)
        torch.mul(new_O - codes_IO[i], scales_IO[i], out=moves[place])
        codes_IO[i] = new_O
        pull.addr_(moments_II[start:stop, i], moves[place], alpha=-1)
    return moves


def _spread(grid: Grid, steps: Steps, weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    scales_OG, zeros_OG = steps
    inputs = weight_OI.shape[1]
    if zeros_OG is None:
        return grid.spread(scales_OG, inputs), weight_OI.new_tensor(float(2 ** (grid.bits - 1))).expand(weight_OI.shape)
    return grid.spread(scales_OG, inputs), grid.spread(zeros_OG, inputs)
