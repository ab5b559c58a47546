"""Calibration and the score on a real GPU: numbers one can plan with, and no more than the maker promises."""

from pathlib import Path

import pytest
import torch

from moesaic.plan.aiperf import MOST_ERROR, score_here
from moesaic.plan.calibrate import measure, write_entry
from moesaic.plan.hardware import load_device

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_a_gpu_can_be_measured(tmp_path: Path) -> None:
    file = write_entry(measure("cuda"), file=tmp_path / "own.yaml")
    here, base = load_device("here", own=file), load_device("h100")
    assert here.units == torch.cuda.get_device_properties(0).multi_processor_count
    assert 0 < here.sustained("bf16") <= 1.05 * here.peak("bf16")
    assert 0 < here.memory <= 1.05 and 0 < here.attention <= 1.05
    assert 1e-7 < here.launch < 1e-3 and 0 < here.k_half < 10 * base.k_half


def test_a_gpu_can_be_scored() -> None:
    found = score_here("cuda")
    assert found.error <= MOST_ERROR and found.operations_per_second > 1e12
