"""Every family that a recipe may name is trained from scratch, and `transformers` computes the same with the result."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

import moesaic
from moesaic.data.preparation.prepare import prepare
from moesaic.errors import UserError
from moesaic.model.config import Latent
from moesaic.model.families import known
from moesaic.recipe import load_recipe
from moesaic.train.architecture import architecture
from moesaic.train.pretrain import pretrain
from moesaic.train.validate import model_config
from tests.matrix import ENCODERS, RENAMED

RECIPE = """
model: {vocab: 300, hidden: 32, layers: 3, heads: 2, kv_heads: 1, head_size: 16, dense_hidden: 32, experts: 4,
        expert_hidden: 16, context: 64}
data:
  sources: [{name: sums, path: "builtin:arithmetic", documents: 200}]
  sequence_length: 64
  quality: null
train: {steps: 12, batch_tokens: 256, data: DATA}
optimizer: {name: adamw, lr: 0.01}
"""
ROUTED = "model.router={score: softmax, correction: false}"
ONE_OF_SIGMOID = "model.router={score: sigmoid, normalize: false, correction: false}"
MIXTURE = ["model.dense_layers=0", "model.shared_experts=0", ROUTED]
DENSE = ["model.dense_layers=3"]
LATENT = "model.latent={kv_rank: 16, q_rank: 24, plain_size: 16, rope_size: 8, value_size: 16}"
WISHES = {
    "glm4_moe": [],
    "glm4": [*DENSE, "model.qk_norm=false"],
    "qwen3_moe": MIXTURE,
    "qwen3": DENSE,
    "mixtral": [*MIXTURE, "model.qk_norm=false"],
    "llama": [*DENSE, "model.qk_norm=false"],
    "deepseek_v3": [LATENT, "model.router.groups=2", "model.router.top_groups=2", "model.mtp_layers=1"],
    "glm_moe_dsa": [LATENT, "model.indexer={heads: 2, head_size: 16, topk: 64, share: 2}"],
    "deepseek_v32": [LATENT, "model.indexer={heads: 2, head_size: 16, topk: 64}"],
    "kimi_k2": [LATENT],
    "glm": [*DENSE, "model.qk_norm=false"],
    "chatglm": [*DENSE, "model.qk_norm=false"],
    "ernie4_5_moe": ["model.qk_norm=false", "model.router={score: softmax}"],
    "gpt_oss": [*MIXTURE, "model.qk_norm=false"],
    "llama4_text": [ONE_OF_SIGMOID, "model.experts_per_token=1"],
    "qwen2_moe": [ROUTED, "model.qk_norm=false"],
    "olmoe": MIXTURE,
    "minimax_m2": ["model.dense_layers=0", "model.shared_experts=0"],
    "hunyuan_v1_moe": ["model.dense_layers=0", ROUTED],
    "dots1": [],
    "qwen3_5_moe_text": [ROUTED, "model.dense_layers=0", "model.delta={every: 3, key_heads: 2, heads: 4}"],
    "qwen3_next": [ROUTED, "model.dense_layers=0", "model.delta={every: 3, key_heads: 2, heads: 4}"],
}


@pytest.fixture(scope="module")
def recipe_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scratch")
    file = folder / "recipe.yaml"
    file.write_text(RECIPE.replace("DATA", str(folder / "data")))
    prepare(load_recipe(file), folder / "data")
    return file


def test_every_family_is_tried() -> None:
    assert {*WISHES, "moesaic", *ENCODERS} == set(known())


@pytest.mark.parametrize("family", WISHES)
def test_it_learns_and_transformers_agrees(family: str, recipe_file: Path, tmp_path: Path) -> None:
    recipe = load_recipe(recipe_file, [f"model.family={family}", *WISHES[family]])
    pretrain(recipe, tmp_path / "run", quiet=True)
    losses = [json.loads(line)["loss"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert losses[-1] < 0.9 * losses[0]
    model = moesaic.load(tmp_path / "run")
    assert model.config.family == family
    if family in RENAMED:
        return
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run", dtype=torch.float32)
    tokens = list(range(3, 20))
    with torch.no_grad():
        logits = theirs(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(model.logits([tokens])[0], logits, rtol=1e-3, atol=1e-4)


def test_latent_families_have_sizes_of_their_own(recipe_file: Path) -> None:
    def made(*overrides: str) -> Latent:
        config = architecture(load_recipe(recipe_file, overrides).model, bos=None, eos=(0,), pad=0)
        assert isinstance(config.attention, Latent)
        return config.attention

    plain = made("model.family=deepseek_v3")
    assert (plain.kv_rank, plain.q_rank, plain.indexer) == (64, 96, None)
    assert made("model.family=deepseek_v3", "model.latent={q_rank: null}").q_rank is None
    found = made("model.family=glm_moe_dsa").indexer
    assert found is not None and found.topk == 2048


def test_layers_share_a_selection(recipe_file: Path) -> None:
    recipe = load_recipe(recipe_file, ["model.family=glm_moe_dsa", "model.indexer={share: 2}"])
    config = architecture(recipe.model, bos=None, eos=(0,), pad=0)
    assert [layer.index for layer in config.layers] == ["full", "shared", "full"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.family=glm_moe_dsa", "model.indexer={topk: 32}"], "nothing trains a fresh indexer to choose"),
        (["model.indexer={topk: 64}"], "belongs to latent attention"),
        (["model.latent={kv_rank: 16}"], "glm4_moe cannot express"),
        (["model.family=deepseek_v3", "model.latent={rope_size: 7}"], "must be even"),
    ],
)
def test_what_cannot_be_is_said(recipe_file: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        model_config(load_recipe(recipe_file, overrides))
