"""Codes and a correction of low rank: what turns and ranks are worth, and matrices with nothing to correct."""

from __future__ import annotations

import pytest
import torch

from moesaic.compress.calibration_statistics import InputStatistics
from moesaic.compress.methods.milo import MiLo

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
