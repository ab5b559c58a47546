"""Refinement beside plain ways to the same: steps by a least-squares solver, codes by trying every one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from moesaic.compress.calibration_statistics import InputStatistics
from moesaic.compress.gptq_rounding import DAMPINGS, damped, gptq_codes, steady_dampings
from moesaic.compress.refine import fitted_steps, refined, rounded_among_others, squared_error
from moesaic.kernels.grid import Grid

INPUTS = 80  # the last group is not full
GRIDS = [Grid(4, 32, symmetric=False), Grid(3, 64, symmetric=True), Grid(4, 32, symmetric=False, whole_zeros=True)]


def given(grid: Grid, outputs: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(grid.bits)
    rows_TI = torch.randn(400, INPUTS, generator=generator) @ torch.randn(INPUTS, INPUTS, generator=generator)
    return torch.randn(outputs, INPUTS, generator=generator), damped(rows_TI.T @ rows_TI / 400, 0.01)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_steps_are_those_of_a_least_squares_solver(grid: Grid) -> None:
    weight_OI, moments_II = given(grid)
    steps = grid.fit(weight_OI)
    codes_OI = grid.codes(weight_OI, *steps)
    scales_OG, zeros_OG = fitted_steps(weight_OI, moments_II, grid, codes_OI, steps)
    root_II = np.linalg.cholesky(moments_II.double().numpy()).T
    groups = np.arange(INPUTS) // grid.group
    if grid.whole_zeros:
        assert steps[1] is not None and zeros_OG is not None and torch.equal(zeros_OG, steps[1])
    for output, codes in enumerate(codes_OI.double().numpy()):
        member = (groups[:, None] == np.arange(scales_OG.shape[1])).astype(float)
        if zeros_OG is None or grid.whole_zeros:
            middle = 4.0 if steps[1] is None else steps[1][output].double().numpy()[groups]
            basis = member * (codes - middle)[:, None]
        else:
            basis = np.concatenate([member * codes[:, None], member], axis=1)
        found, *_ = np.linalg.lstsq(root_II @ basis, root_II @ weight_OI[output].double().numpy(), rcond=None)
        wanted = found[: scales_OG.shape[1]]
        assert np.allclose(scales_OG[output].numpy(), wanted, rtol=3e-3)  # they are kept in half precision
        if zeros_OG is not None and not grid.whole_zeros:
            assert np.allclose(zeros_OG[output].numpy(), -found[scales_OG.shape[1] :] / wanted, rtol=3e-3, atol=1e-2)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_codes_are_those_of_trying_every_one(grid: Grid) -> None:
    weight_OI, moments_II = given(grid, outputs=3)
    steps = grid.fit(weight_OI)
    begun_OI = grid.codes(weight_OI, *steps)
    found_OI = rounded_among_others(weight_OI, moments_II, grid, begun_OI, steps)
    zeros_OG = torch.full_like(steps[0], 4.0) if steps[1] is None else steps[1]
    scales_OI, zeros_OI = grid.spread(steps[0], INPUTS).double(), grid.spread(zeros_OG, INPUTS).double()
    tried_OI, moments = begun_OI.double(), moments_II.double()
    for i in moments_II.diagonal().argsort(descending=True, stable=True).tolist():
        losses = []
        for code in range(grid.top + 1):
            tried_OI[:, i] = code
            off_OI = (tried_OI - zeros_OI) * scales_OI - weight_OI
            losses.append((off_OI @ moments * off_OI).sum(1))
        tried_OI[:, i] = torch.stack(losses).argmin(0).double()
    assert (found_OI.double() == tried_OI).double().mean() > 0.98  # float32 may fall on the other side of a half


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_it_loses_less_than_gptq_alone(grid: Grid) -> None:
    weight_OI, moments_II = given(grid, outputs=48)
    steps = grid.fit(weight_OI, moments_II.diagonal())
    codes_OI = gptq_codes(weight_OI, moments_II, grid, *steps)
    before = squared_error(weight_OI, moments_II, grid, codes_OI, steps)
    better_OI, better = refined(weight_OI, moments_II, grid, codes_OI, steps, 4)
    assert squared_error(weight_OI, moments_II, grid, better_OI, better) < 0.95 * before
    assert 0 <= better_OI.min() and better_OI.max() <= grid.top and torch.equal(better_OI, better_OI.round())
    assert refined(weight_OI, moments_II, grid, codes_OI, steps, 0)[0] is codes_OI


def test_few_tokens_are_damped_more_than_many() -> None:
    grid, generator = Grid(4, 32, symmetric=False), torch.Generator().manual_seed(1)
    mixing_II = torch.randn(INPUTS, INPUTS, generator=generator) * torch.logspace(-1, 1, INPUTS)
    weight_OI = torch.randn(64, INPUTS, generator=generator)
    chosen = []
    for tokens in (64, 20_000):
        statistics = InputStatistics(torch.randn(tokens, INPUTS, generator=generator) @ mixing_II)
        chosen.append(next(steady_dampings(weight_OI, statistics, grid)))
    assert chosen[0] > chosen[1] and set(chosen) <= set(DAMPINGS)
