"""Hidden units left out whole: those that a group Lasso or leverage scores choose lose less than chance.

pytest tests/compress/test_iss.py
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from moesaic.compress.calibration_statistics import InputStatistics
from moesaic.compress.compress import CompressionRequest, compress
from moesaic.compress.methods.iss import IntrinsicSparseStructures, drawn_columns, lasso_sizes
from moesaic.model.directory import load, save
from moesaic.train.constraints.iss import IntrinsicSparseStructures as GroupLasso
from moesaic.train.optimizers.adamw import AdamW
from tests.compress.made import make

HIDDEN, WIDTH = 48, 24


@pytest.fixture(scope="module")
def network() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A third of the units are near copies of others, and a third hardly speak."""
    draw = torch.Generator().manual_seed(0)
    gate_up = torch.randn(2, HIDDEN, WIDTH, generator=draw)
    third = HIDDEN // 3
    gate_up[:, third : 2 * third] = gate_up[:, :third] + 0.05 * torch.randn(2, third, WIDTH, generator=draw)
    gate_up[1, 2 * third :] *= 0.1
    down = torch.randn(WIDTH, HIDDEN, generator=draw)
    calibration, others = torch.randn(2, 600, WIDTH, generator=draw)
    return gate_up.flatten(0, 1), down, calibration, others


def hidden(gate_up: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    gate, up = F.linear(rows, gate_up).chunk(2, dim=1)
    return F.silu(gate) * up


def lost(method: IntrinsicSparseStructures, network: tuple[torch.Tensor, ...]) -> float:
    gate_up, down, calibration, others = network
    made_up, made_down = method.narrowed(gate_up, down, InputStatistics(hidden(gate_up, calibration)))
    assert made_up.shape == (2 * made_down.shape[1], WIDTH) and made_down.shape[1] == method.left(HIDDEN)
    wanted = hidden(gate_up, others) @ down.T
    return float((hidden(made_up, others) @ made_down.T - wanted).norm() / wanted.norm())


def test_chosen_units_lose_less_than_chance_at_the_same_number(network: tuple[torch.Tensor, ...]) -> None:
    def mean(score: str, draws: int) -> float:
        found = [lost(IntrinsicSparseStructures(0.5, score, seed=n), network) for n in range(draws)]  # type: ignore[arg-type]
        return sum(found) / draws

    chance = mean("random", 6)
    assert mean("lasso", 1) < 0.6 * chance
    assert mean("lasso", 1) < 0.8 * lost(IntrinsicSparseStructures(0.5, "magnitude"), network)
    assert mean("leverage", 6) < 0.85 * chance


def test_units_that_stay_make_up_for_others(network: tuple[torch.Tensor, ...]) -> None:
    fitted, plain = (lost(IntrinsicSparseStructures(0.5, "magnitude", refit), network) for refit in (True, False))
    assert fitted < 0.8 * plain


def test_the_penalty_leaves_as_many_as_are_wanted(network: tuple[torch.Tensor, ...]) -> None:
    gate_up, down, calibration, _ = network
    sizes = lasso_sizes(down, InputStatistics(hidden(gate_up, calibration)).moments_II, 24)
    assert 20 <= int((sizes > 1e-3 * sizes.max()).sum()) <= 28


def test_no_unit_is_drawn_beside_its_copy() -> None:
    draw = torch.Generator().manual_seed(2)
    rows = torch.randn(400, 8, generator=draw)
    moments = InputStatistics(torch.cat([rows, rows], 1)).moments_II
    for seed in range(5):
        drawn = drawn_columns(torch.ones(4, 16), moments, 8, torch.Generator().manual_seed(seed))
        assert sorted((drawn % 8).tolist()) == list(range(8))


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_the_directory_is_a_narrower_model(kind: str, tmp_path: Path) -> None:
    path = make(tmp_path / "model", kind)
    wish = CompressionRequest(samples=4, length=64, check_tokens=0)
    compress(path, IntrinsicSparseStructures(0.5), tmp_path / "out", wish)
    before, after = load(path), load(tmp_path / "out")
    widths = [model.config.layers[0].ffn.hidden for model in (before, after)]
    assert widths == ([96, 48] if kind == "llama" else [32, 16])
    assert len(after.logits([[1, 2, 3]])[0]) == 3


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_units_that_training_has_led_to_zero_are_packed_without_loss(kind: str, tmp_path: Path) -> None:
    model = load(make(tmp_path / "model", kind))
    held = GroupLasso(0.5, settle=1.0).build(model, AdamW().build(model.named_parameters()), 4)
    held.after_step(1, 0.001)
    save(model, tmp_path / "trained")
    wish = CompressionRequest(samples=4, length=64, check_tokens=0)
    packing = IntrinsicSparseStructures(0.5, "magnitude", refit=False)
    compress(tmp_path / "trained", packing, tmp_path / "packed", wish)
    packed = load(tmp_path / "packed")
    assert packed.config.layers[0].ffn.hidden == (48 if kind == "llama" else 16)
    for before, after in zip(model.logits([[1, 2, 3, 4]]), packed.logits([[1, 2, 3, 4]]), strict=True):
        torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4)
