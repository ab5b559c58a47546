"""Codes and a correction of low rank: what turns and ranks are worth, and matrices with nothing to correct."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
import torch

from moesaic.compress.calibration_statistics import InputStatistics
from moesaic.compress.job import Job
from moesaic.compress.methods.milo import MiLo
from moesaic.kernels.quantized import QuantizedMatrix

SIZE = 64


@pytest.fixture
def weight_and_seen() -> tuple[torch.Tensor, InputStatistics]:
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(512, SIZE, generator=draw) @ torch.randn(SIZE, SIZE, generator=draw)
    saliency = [(32, torch.rand(512, generator=draw) + 0.5), (64, torch.rand(512, generator=draw) + 0.5)]
    return torch.randn(96, SIZE, generator=draw), InputStatistics(rows, saliency=saliency)


@pytest.mark.parametrize("calibrate", [True, False])
def test_a_correction_and_more_turns_lose_less(
    weight_and_seen: tuple[torch.Tensor, InputStatistics], calibrate: bool
) -> None:
    weight_OI, statistics = weight_and_seen

    def lost(rank: int, turns: int) -> float:
        made = MiLo(bits=3, group=64, rank=rank, turns=turns, calibrate=calibrate).matrix("one", weight_OI, statistics)
        if calibrate:
            return statistics.error(weight_OI, made.dense())
        return float((made.dense() - weight_OI).square().sum())

    without, once, often = lost(0, 1), lost(16, 1), lost(16, 8)
    assert often < 0.95 * once < 0.95 * 0.9 * without


@pytest.mark.parametrize("outputs", [48, 96])
@pytest.mark.parametrize("calibrate", [True, False])
def test_a_matrix_with_nothing_left_over(
    weight_and_seen: tuple[torch.Tensor, InputStatistics], calibrate: bool, outputs: int
) -> None:
    nothing_OI = torch.zeros(outputs, SIZE)
    statistics = InputStatistics(weight_and_seen[1].rows_TI)
    made = MiLo(rank=8, turns=2, calibrate=calibrate).matrix("one", nothing_OI, statistics)
    assert torch.equal(made.dense(), nothing_OI)
    assert made.down_RI is not None and made.down_RI.dense().abs().max() < 1  # nor is half of it large


def test_experts_with_heavy_tails_get_more_rank_and_lose_less_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """At no larger a budget than equal ranks, which is what constant kurtosis gives."""
    draw = torch.Generator().manual_seed(1)
    experts_EOI = torch.randn(4, 96, SIZE, generator=draw)
    for _ in range(12):  # large weights along a few directions: heavy tails, of low rank
        left, right = torch.randn(96, generator=draw) ** 3, torch.randn(SIZE, generator=draw) ** 3
        experts_EOI[0] += 0.4 * left[:, None] * right
    layer = SimpleNamespace(ffn=SimpleNamespace(per_token=2, count=4))
    job = SimpleNamespace(tensor=lambda path: experts_EOI, config=SimpleNamespace(layers=[layer]))
    method = MiLo(bits=3, group=32, expert_rank=8, turns=3, calibrate=False)

    def lost() -> tuple[list[int], float]:
        make = method.matrix_compressor(cast(Job, job))
        made = [
            make(f"layers.0.ffn.gate_up_EGD.{n}", weight_OI, InputStatistics(torch.zeros(0, SIZE), 0.5))
            for n, weight_OI in enumerate(experts_EOI)
        ]
        ranks = [matrix.down_RI.shape[0] for matrix in made if isinstance(matrix, QuantizedMatrix) and matrix.down_RI]
        return ranks, float(sum((of.dense() - w).square().sum() for of, w in zip(made, experts_EOI, strict=True)))

    ranks, by_kurtosis = lost()
    monkeypatch.setattr("moesaic.compress.methods.milo._kurtosis", lambda weight_OI: 3.0)
    equal, alike = lost()
    assert ranks[0] > 1.4 * max(ranks[1:]) and sum(ranks) <= sum(equal) == 4 * 8
    assert by_kurtosis < 0.93 * alike
