"""A run whose data ranks exchange one bit per weight: it resumes to the same bits, and on one process too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from moesaic.data.preparation.prepare import prepare
from moesaic.errors import UserError
from moesaic.recipe import load_recipe
from moesaic.train.loop import train
from moesaic.train.pretrain import pretrain
from moesaic.train.ranks import check_parallel, open_world
from moesaic.train.run import Run
from moesaic.train.validate import model_config
from tests.parallel.ranks import on_ranks
from tests.parallel.small_runs import as_rank

RECIPE = """
model: {vocab: 512, hidden: 32, layers: 2, heads: 2, kv_heads: 1, head_size: 16, dense_hidden: 48, experts: 4,
        expert_hidden: 16, context: 64}
data:
  sources: [{name: sums, path: "builtin:arithmetic", documents: 400}]
  sequence_length: 64
train: {steps: 10, batch_tokens: 512, save_every: 5, dtype: float32, data: DATA}
optimizer: {name: zero_one_adam, lr: 0.01, variance_double_every: 1, local_double_every: 4, local_limit: 4}
parallel: {zero: 0}
"""


def run(rank: int, world: int, folder: Path) -> None:
    as_rank(rank, world)
    recipe = load_recipe(folder / "recipe.yaml")
    world_of_run = open_world(recipe, check_parallel(recipe, model_config(recipe)))
    whole = Run(recipe, folder / "whole", folder / "data", quiet=True, world=world_of_run)
    train(whole)
    exchange = whole.optimizer.exchange
    assert exchange is not None and exchange.ranks == world
    plain = 10 * 2 * (world - 1) * 4 * sum(parameter.numel() for parameter in whole.model.parameters()) / world
    assert 0 < exchange.sent_bytes < 0.8 * plain  # two checkpoints' worth of errors too

    pretrain(load_recipe(folder / "recipe.yaml", ["train.steps=5"]), folder / "parts", quiet=True)
    pretrain(recipe, folder / "parts", quiet=True)
    sharded = load_recipe(folder / "recipe.yaml", ["parallel.zero=2"])
    with pytest.raises(UserError, match="hold all parameters"):
        check_parallel(sharded, model_config(sharded))


def test_a_run_on_two_ranks(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE.replace("DATA", str(tmp_path / "data")))
    recipe = load_recipe(tmp_path / "recipe.yaml")
    prepare(recipe, tmp_path / "data")
    on_ranks(2, run, tmp_path, tmp_path)
    found, expected = (load_file(tmp_path / out / "model.safetensors") for out in ("parts", "whole"))
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
    summary = pretrain(load_recipe(tmp_path / "recipe.yaml", ["train.steps=12"]), tmp_path / "whole", quiet=True)
    assert summary["steps"] == 12
