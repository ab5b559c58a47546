"""Small runs on several real ranks: prepared data, recipes of three families, and what a run leaves behind."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from moesaic.data.preparation.prepare import prepare
from moesaic.recipe import Recipe, load_recipe
from moesaic.train.pretrain import pretrain
from moesaic.train.report.metrics import read_metrics

TINY = Path(__file__).parents[2] / "recipes/tiny.yaml"
SIZES = "vocab: 320, hidden: 32, layers: 2, dense_hidden: 48, experts: 4, experts_per_token: 2, expert_hidden: 24"
SHAPES = {
    "glm": "family: glm4_moe, heads: 4, kv_heads: 2, head_size: 8, mtp_layers: 1, shared_experts: 1, dense_layers: 1",
    "qwen": "family: qwen3_moe, heads: 4, kv_heads: 2, head_size: 8, shared_experts: 0, dense_layers: 0, tied: false,"
    " router: {score: softmax, correction: false}",
    "deepseek": "family: deepseek_v3, heads: 4, dense_layers: 1, shared_experts: 1, router: {groups: 2, top_groups: 1},"
    " latent: {kv_rank: 10, q_rank: 12, plain_size: 8, rope_size: 4, value_size: 8}",
}
COMMON = [
    "data.sources=[{name: sums, path: 'builtin:sums', documents: 400}]",
    "data.sequence_length=64",
    "train.batch_tokens=512",
    "train.dtype=float32",
    "train.warmup_steps=0",
    # A large epsilon: a weight whose gradient is rounding noise must not move by a whole step for it.
    "optimizer={name: adamw, lr: 0.003, eps: 1.0e-4}",
]


def recipe_of(shape: str, *overrides: str) -> Recipe:
    return load_recipe(TINY, [f"model={{{SIZES}, context: 64, {SHAPES[shape]}}}", *COMMON, *overrides])


def prepared(folder: Path) -> Path:
    prepare(recipe_of("glm"), folder)
    return folder


def run(shape: str, data: Path, out: Path, *overrides: str) -> None:
    """In this process: as one of several ranks, if `as_rank` said so."""
    pretrain(recipe_of(shape, f"train.data={data}", *overrides), out, quiet=True)


def as_rank(rank: int, world: int) -> None:
    """What torchrun would say."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))


def weights(out: Path) -> dict[str, Tensor]:
    return load_file(out / "model.safetensors")


def state(out: Path) -> dict[str, Tensor]:
    return load_file(out / "checkpoints/latest/state/optimizer.safetensors")


def losses(out: Path) -> list[float]:
    return [float(line["loss"]) for line in read_metrics(out)]


def assert_same(found: Path, expected: Path) -> None:
    """To the bit: weights, optimizer state, losses."""
    for read in (weights, state):
        mine, other = read(found), read(expected)
        assert mine.keys() == other.keys()
        assert [name for name in mine if not torch.equal(mine[name], other[name])] == []
    assert losses(found) == losses(expected)


def assert_as_alone(found: Path, alone: Path, exact: bool, shown: Sequence[str], atol: float) -> None:
    """A run of several ranks is as that of one process, to the bit or within rounding, and so is what it shows."""
    if exact:
        assert_same(found, alone)
    else:
        assert_close(found, alone, alone.name)
    for mine, other in zip(read_metrics(found), read_metrics(alone), strict=True):
        for key in shown:
            assert (key in mine) == (key in other), (alone.name, key)
            if key in mine:
                assert mine[key] == pytest.approx(other[key], rel=1e-4, abs=atol), (alone.name, key)


def assert_close(found: Path, expected: Path, what: str) -> None:
    """Within rounding: every step's loss, every weight, and the running means of every parameter's gradient."""
    for mine, other in zip(losses(found), losses(expected), strict=True):
        assert abs(mine - other) <= 1e-5 * abs(other) + 1e-8, (what, losses(found), losses(expected))
    for read, keep in ((weights, ""), (state, "/exp_avg")):
        of, known = read(found), read(expected)
        assert of.keys() == known.keys(), what
        for name, tensor in known.items():
            if name.endswith(keep):
                apart = (of[name] - tensor).norm() / tensor.norm().clamp(min=1e-6)
                assert apart < 1e-4, (what, name, float(apart))
