"""`train.dtype: fp8` with its rounding emulated on a CPU: the loss falls beside float32's, and runs resume.

pytest tests/train/test_float8.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

import pytest
import torch

from moesaic.data.preparation.prepare import prepare
from moesaic.errors import UserError
from moesaic.kernels import float8 as kernels
from moesaic.kernels.float8 import Float8Kernels, ReferenceFloat8
from moesaic.kernels.interface import Kernels
from moesaic.model.config import Dense, Experts, GroupedQuery, Layer, Rope
from moesaic.model.context import Routing
from moesaic.model.transformer import Model
from moesaic.recipe import load_recipe
from moesaic.train import float8
from moesaic.train.objectives.next_token import NextToken
from moesaic.train.pretrain import pretrain
from moesaic.train.validate import check
from tests.train.small import small_mixture
from tests.train.tiny_runs import VOCAB, batch

ROOT = Path(__file__).parents[2]
CONFIG = small_mixture(
    VOCAB, 64, GroupedQuery(2, 1, 32), Rope(16), [Layer(Dense(64)), Layer(Experts(4, 2, 64))], init_std=0.1
)
RECIPE = """
model: {vocab: 512, hidden: 128, layers: 2, heads: 2, kv_heads: 1, head_size: 32, dense_hidden: 128, experts: 4,
        expert_hidden: 128, context: 64}
data: {sources: [{name: sums, path: "builtin:arithmetic", documents: 60}], sequence_length: 64}
train: {steps: 4, batch_tokens: 128, save_every: 2, dtype: fp8, data: DATA}
schedule: constant
"""


def losses(in_float8: bool, steps: int = 24) -> torch.Tensor:
    """Of a tiny mixture on sequences with a rule."""
    model = Model(CONFIG).initialize(0)
    if in_float8:
        model.ops = cast(Kernels, Float8Kernels(model.ops, ReferenceFloat8()))
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=0.01), []
    for step in range(steps):
        given = batch(1, step)
        loss = NextToken()(model, given, Routing()).total
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return torch.tensor(found)


def test_the_loss_falls_beside_that_in_float32(monkeypatch):
    plain, rounded = losses(False), losses(True)
    assert plain[-5:].mean() < plain[0] - 0.8, "there is something to learn"
    assert not torch.equal(plain, rounded)
    assert (rounded[-10:].mean() - plain[-10:].mean()).abs() < 0.1
    # Without scales gradients are smaller than the smallest number there is.
    monkeypatch.setattr(kernels, "rounded_rows", lambda x_TI: x_TI.to(torch.float8_e4m3fn).float())
    assert losses(True)[-10:].mean() > plain[-10:].mean() + 0.2


@pytest.fixture
def recipe_file(tmp_path, monkeypatch):
    """On a machine whose matmuls in float8 are emulated."""
    file = tmp_path / "recipe.yaml"
    file.write_text(RECIPE.replace("DATA", str(tmp_path / "data")))
    prepare(load_recipe(file), tmp_path / "data")
    monkeypatch.setattr(float8, "matmuls", lambda device: ReferenceFloat8())
    return file


def run(file, out, *overrides):
    return pretrain(load_recipe(file, list(overrides)), out, quiet=True)


def recorded(out):
    return [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_a_run_resumes_to_the_same_losses_and_its_model_is_one_of_bfloat16(recipe_file, tmp_path):
    run(recipe_file, tmp_path / "whole")
    run(recipe_file, tmp_path / "twice", "train.steps=2")
    run(recipe_file, tmp_path / "twice")
    whole, twice = recorded(tmp_path / "whole"), recorded(tmp_path / "twice")
    assert len(whole) == 4 and twice == whole
    assert json.loads((tmp_path / "whole" / "config.json").read_text())["dtype"] == "bfloat16"
    with pytest.raises(UserError, match="holds a run of train.dtype fp8, and auto is asked for.*train.dtype=fp8"):
        run(recipe_file, tmp_path / "whole", "train.dtype=auto", "train.steps=8")


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["model.expert_hidden=96"], "multiples of 128, not 128 x 96"),
        (["train.constraint={name: quantized}"], "has matmuls of its own"),
    ],
)
def test_what_cannot_be_in_float8_is_refused(overrides, problem, recipe_file, tmp_path):
    with pytest.raises(UserError, match=problem):
        run(recipe_file, tmp_path / "run", *overrides)
    assert not (tmp_path / "run").exists()


def test_without_tensor_cores_for_it_there_is_none():
    with pytest.raises(UserError, match="tensor cores .* this machine has no GPU.*Set it to bfloat16"):
        float8.check(CONFIG, torch.device("cpu"))


def test_the_recipe_for_a_gpu_has_sizes_for_it(monkeypatch):
    """Its line with fp8 cannot be run here."""
    monkeypatch.setattr(float8, "matmuls", lambda device: None)
    recipe = load_recipe(ROOT / "recipes/gpu.yaml", ["train.dtype=fp8"])
    check(recipe)
    with pytest.raises(UserError, match="multiples of 128"):
        check(load_recipe(ROOT / "recipes/gpu.yaml", ["train.dtype=fp8", "model.expert_hidden=200"]))
