"""What methods are for: on small problems each loses less than without its idea, by more than seeds differ."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from moesaic.compress.calibration_statistics import InputStatistics
from moesaic.compress.gptq_rounding import gptq_codes
from moesaic.compress.job import Job
from moesaic.compress.methods.awq import AWQ
from moesaic.compress.methods.gptq import GPTQ
from moesaic.compress.methods.hqq import HQQ
from moesaic.compress.methods.milo import MiLo
from moesaic.compress.methods.nm import NM
from moesaic.compress.methods.rtn import RoundToNearest
from moesaic.compress.refine import weights_of
from moesaic.kernels.grid import Grid
from moesaic.kernels.quantized import QuantizedMatrix

SEEDS = range(4)
OUTPUTS, INPUTS, TOKENS = 48, 64, 512


def problem(seed: int) -> tuple[Tensor, InputStatistics]:
    """Weights, and inputs that hang together, from a tenth to ten in size."""
    draw = torch.Generator().manual_seed(seed)
    mixing_II = torch.randn(INPUTS, INPUTS, generator=draw) / INPUTS**0.5 + torch.eye(INPUTS)
    sizes_I = torch.logspace(-1, 1, INPUTS)[torch.randperm(INPUTS, generator=draw)]
    rows_TI = torch.randn(TOKENS, INPUTS, generator=draw) @ mixing_II * sizes_I
    return torch.randn(OUTPUTS, INPUTS, generator=draw), InputStatistics(rows_TI)


def dense(made: QuantizedMatrix | Tensor) -> Tensor:
    return made if isinstance(made, Tensor) else made.dense()


def losses(make: Callable[[Tensor, InputStatistics], QuantizedMatrix | Tensor]) -> Tensor:
    """The error at the output, for each seed."""
    found = []
    for seed in SEEDS:
        weight_OI, statistics = problem(seed)
        found.append(statistics.error(weight_OI, dense(make(weight_OI, statistics))))
    return torch.tensor(found)


def clearly_less(one: Tensor, other: Tensor, margin: float = 0.9) -> None:
    """In every problem, and on average by twice what seeds make of the ratio."""
    ratio = one / other
    assert (ratio < 1).all() and ratio.mean() < margin and 1 - ratio.mean() > 2 * ratio.std() / len(ratio) ** 0.5, ratio


def test_rtn_gives_every_group_its_own_steps() -> None:
    def apart(group: int) -> Tensor:
        found = []
        for seed in SEEDS:
            weight_OI, statistics = problem(seed)
            weight_OI = weight_OI * torch.logspace(-1, 1, INPUTS)
            made = RoundToNearest(bits=4, group=group).matrix("one", weight_OI, statistics)
            found.append(float((made.dense() - weight_OI)[:, :32].square().mean()))
        return torch.tensor(found)

    clearly_less(apart(32), apart(0), 0.3)


def test_gptq_makes_up_for_errors_at_inputs_still_to_come() -> None:
    plain = RoundToNearest(bits=3, group=32, symmetric=False)
    method = GPTQ(bits=3, group=32, damping=0.01, turns=0)
    rounded = losses(lambda weight_OI, statistics: plain.matrix("one", weight_OI, statistics))
    clearly_less(losses(lambda weight_OI, statistics: method.matrix("one", weight_OI, statistics)), rounded, 0.6)


def test_gptq_rounds_large_inputs_first() -> None:
    """The first have most others left to make up for their errors. The order in which inputs come changes nothing for
    who orders them by their moments."""

    def lost(falling: bool) -> Tensor:
        found = []
        for seed in SEEDS:
            weight_OI, statistics = problem(seed)
            moments_II = statistics.moments_II
            order_I = moments_II.diagonal().argsort(descending=falling)
            weight_OI, moments_II = weight_OI[:, order_I], moments_II[order_I][:, order_I]
            grid = Grid(3, 0)
            steps = grid.fit(weight_OI)
            off_OI = weights_of(grid, gptq_codes(weight_OI, moments_II, grid, *steps), steps) - weight_OI
            found.append(float((off_OI @ moments_II * off_OI).sum()))
        return torch.tensor(found)

    assert torch.allclose(lost(falling=True), lost(falling=False), rtol=0.02)


def test_gptq_refines_codes_and_steps() -> None:
    def of(turns: int) -> Tensor:
        method = GPTQ(bits=3, group=32, damping=0.01, turns=turns)
        return losses(lambda weight_OI, statistics: method.matrix("one", weight_OI, statistics))

    clearly_less(of(3), of(0), 0.95)


def test_awq_widens_what_carries_large_inputs() -> None:
    method = AWQ(bits=3, group=32)

    def scaled(weight_OI: Tensor, statistics: InputStatistics) -> Tensor:
        scale_I = method._best([weight_OI], statistics)
        return method._grid().rounded(weight_OI * scale_I) / scale_I

    def plain(weight_OI: Tensor, statistics: InputStatistics) -> Tensor:
        return method._grid().rounded(weight_OI)

    def as_large_as_they_are(weight_OI: Tensor, statistics: InputStatistics) -> Tensor:
        scale_I = statistics.size_I / statistics.size_I.mean()
        return method._grid().rounded(weight_OI * scale_I) / scale_I

    clearly_less(losses(scaled), losses(plain), 0.9)
    clearly_less(losses(scaled), losses(as_large_as_they_are), 0.9)  # how far to go is searched for


@pytest.mark.parametrize("size", [1.0, 0.02])  # the latter as in language models
def test_hqq_counts_large_errors_less(size: float) -> None:
    """In its own measure, errors to the power of 0.7: weights lose less than with steps by squares, and less than if
    large errors pulled at the zeros as others do."""
    grid = Grid(3, 64, symmetric=False)
    found: dict[str, list[float]] = {"own": [], "squares": [], "all pull": []}
    for seed in SEEDS:
        weight_OI = size * torch.randn(OUTPUTS, INPUTS, generator=torch.Generator().manual_seed(seed))
        made = HQQ(bits=3, group=64).matrix("one", weight_OI, InputStatistics(torch.ones(1, INPUTS)))
        scales_OG, zeros_OG = grid.fit(weight_OI)
        tried = []
        for _ in range(20):
            rounded_OI = grid.matrix(weight_OI, (scales_OG, zeros_OG)).dense()
            tried.append((rounded_OI - weight_OI).abs().pow(0.7).sum(1))
            codes_OI = grid.codes(weight_OI, scales_OG, zeros_OG)
            zeros_OG = (codes_OI - weight_OI / scales_OG).mean(1, keepdim=True).half().float()
        every = OUTPUTS * INPUTS
        found["own"].append(float((made.dense() - weight_OI).abs().pow(0.7).sum() / every))
        found["squares"].append(float(tried[0].sum() / every))
        found["all pull"].append(float(torch.stack(tried).amin(0).sum() / every))
    own, squares, all_pull = (torch.tensor(found[name]) for name in ("own", "squares", "all pull"))
    clearly_less(own, squares, 0.98)
    clearly_less(own, all_pull, 0.995)


def fake_mixture(experts: list[Tensor], per_token: int) -> Job:
    """As much of a job as a method asks of one that has these experts in its first layer."""
    ffn = SimpleNamespace(count=len(experts), per_token=per_token)
    config = SimpleNamespace(layers=(SimpleNamespace(ffn=ffn),), mtp=())
    return cast(Job, SimpleNamespace(config=config, tensor=lambda name: torch.stack(experts)))


def test_milo_gives_heavy_tails_and_busy_experts_more_rank() -> None:
    draw = torch.Generator().manual_seed(0)
    even_OI = torch.rand(OUTPUTS, INPUTS, generator=draw) - 0.5
    heavy_OI = torch.randn(OUTPUTS, INPUTS, generator=draw) * torch.rand(OUTPUTS, INPUTS, generator=draw).pow(-0.4)
    experts = [even_OI, heavy_OI]
    rows_TI = torch.randn(TOKENS, INPUTS, generator=draw)

    def ranks(calibrate: bool, shares: tuple[float, float]) -> list[int]:
        method = MiLo(bits=3, group=64, expert_rank=12, turns=1, calibrate=calibrate)
        make = method.matrix_compressor(fake_mixture(experts, per_token=1))
        made = [
            make(f"layers.0.ffn.gate_up_EGD.{number}", weight_OI, InputStatistics(rows_TI, shares[number]))
            for number, weight_OI in enumerate(experts)
        ]
        assert all(isinstance(matrix, QuantizedMatrix) and matrix.down_RI is not None for matrix in made)
        return [len(cast(Any, matrix).down_RI.dense()) for matrix in made]

    even, heavy = ranks(False, (0.5, 0.5))
    assert heavy >= 2 * even
    idle, busy = ranks(True, (0.9, 0.1)), ranks(True, (0.1, 0.9))
    assert idle[0] > busy[0] and idle[1] < busy[1]


def test_a_low_rank_correction_goes_by_what_flows_in() -> None:
    """Of an equal rank, one from the singular values of the error at the output loses less there."""

    def of(calibrate: bool) -> Tensor:
        method = MiLo(bits=3, group=64, rank=12, turns=2, calibrate=calibrate)
        return losses(lambda weight_OI, statistics: method.matrix("one", weight_OI, statistics))

    clearly_less(of(True), of(False), 0.6)


def test_admm_chooses_and_fits_what_stays() -> None:
    """NxMTransformer beats the largest weights times their inputs, and those the largest weights alone."""

    def of(score: Any, **options: Any) -> Tensor:
        method = NM(score=score, **options)
        return losses(lambda weight_OI, statistics: method.matrix("one", weight_OI, statistics))

    magnitude, wanda, admm = of("magnitude"), of("wanda"), of("admm")
    clearly_less(wanda, magnitude, 0.8)
    clearly_less(admm, wanda, 0.5)
    for seed in SEEDS:
        weight_OI, statistics = problem(seed)
        kept_OI = dense(NM(score="admm").matrix("one", weight_OI, statistics)) != 0
        assert (kept_OI.unflatten(1, (-1, 4)).sum(-1) <= 2).all()
        again = NM(score="admm", rounds=1).matrix("one", weight_OI, statistics)
        assert statistics.error(weight_OI, dense(again)) > float(admm[seed])  # turns are worth something
    bits = of("admm", bits=4, group=32)
    rounded_after = []
    for seed in SEEDS:  # NxMiFormer: codes are found for what stays, errors made up for, instead of rounded afterwards
        weight_OI, statistics = problem(seed)
        sparse_OI = dense(NM(score="admm").matrix("one", weight_OI, statistics))
        rounded_OI = Grid(4, 32).rounded(sparse_OI) * (sparse_OI != 0)
        rounded_after.append(statistics.error(weight_OI, rounded_OI))
    clearly_less(bits, torch.tensor(rounded_after), 0.95)
