"""Which model is meant, and what it amounts to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moesaic.errors import UserError
from moesaic.model.facts import facts
from moesaic.model.families import read_config
from moesaic.plan.models import from_dimensions, load_model
from moesaic.plan.shape import attended

# Published sizes in billions: all parameters, and active ones where they are published.
PUBLISHED = {
    "GLM-4.5": (355, 32), "GLM-4.5-Air": (106, 12), "GLM-5": (744, 40), "Qwen3-30B-A3B": (30.5, 3.3),
    "Qwen3-235B-A22B": (235, 22), "GPT-OSS-120B": (117, 5.1), "Mixtral-8x7B": (46.7, 12.9),
    "Mixtral-8x22B": (141, 39), "DeepSeek-V3": (671, 37), "Kimi-K2": (1026, 32), "Llama-3-8B": (8.03, None),
    "Llama-3-70B": (70.6, None), "Llama-3-405B": (405.9, None), "GPT-3 175B": (175, None), "Megatron 1T": (1008, None),
    "Megatron-22B": (22, None), "SmolLM2-135M": (0.1345, None),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes(name: str) -> None:
    model, (whole, active) = load_model(name), PUBLISHED[name]
    assert model.parameters / 1e9 == pytest.approx(whole, rel=0.012)
    if active:  # some count the embedding, some do not
        assert model.active_parameters / 1e9 == pytest.approx(active, rel=0.1)


@pytest.mark.parametrize("name", ["zai-org/GLM-4.5-Air-FP8", "glm4.5_air", "GLM-4.5-Air", "glm-4.5-air"])
def test_one_model_has_many_spellings(name: str) -> None:
    assert load_model(name).name == "glm-4.5-air"


def test_unknown_name_says_the_nearest() -> None:
    with pytest.raises(UserError, match="glm-4.5-air"):
        load_model("GLM-4.5-Ari")


CONFIGS = {
    "qwen3_moe": {
        "model_type": "qwen3_moe", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 100, "num_experts": 8,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True,
        "tie_word_embeddings": False,
    },
    "glm4_moe": {
        "model_type": "glm4_moe", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 100, "n_routed_experts": 8,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1, "n_shared_experts": 1,
        "tie_word_embeddings": False,
    },
    "deepseek_v3": {
        "model_type": "deepseek_v3", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 100, "n_routed_experts": 8,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1, "n_shared_experts": 1,
        "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
        "n_group": 1, "topk_group": 1, "tie_word_embeddings": False,
    },
    "llama": {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100, "tie_word_embeddings": True,
    },
}  # fmt: skip


@pytest.mark.parametrize("family", CONFIGS)
def test_directory_counts_what_the_model_holds(family: str, tmp_path: Path) -> None:
    """Beside the product's own model of the same configuration: parameters, but for norms, and KV cache per token."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[family]))
    shape = load_model(str(tmp_path))
    real = facts(read_config(CONFIGS[family], tmp_path))
    assert shape.parameters == pytest.approx(real.parameters, rel=0.01)
    assert shape.cache_width() * 4 == real.kv_bytes_per_token


def test_bare_dimensions(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        "layers: 48\nhidden: 4096\nheads: 32\nkv_heads: 8\nffn: 14336\nvocab: 32000\n"
        "experts: 8\ntopk: 2\nexpert_hidden: 14336\nshared: 0\n"
    )
    shape = load_model(str(file))
    per_layer = 4096 * 4096 * 2 + 4096 * 1024 * 2 + 8 * 3 * 4096 * 14336 + 8 * 4096 + 2 * 4096
    assert shape.parameters == 48 * per_layer + 2 * 32000 * 4096 + 4096
    assert shape.experts == 8 and shape.topk == 2 and shape.layers[0].ffn.gated


def test_four_times_hidden_is_not_gated() -> None:
    plain = {"layers": 2, "hidden": 64, "heads": 4, "vocab": 100}
    assert not from_dimensions({**plain, "ffn": 256}, "x", "x").layers[0].ffn.gated
    assert from_dimensions({**plain, "ffn": 224}, "x", "x").layers[0].ffn.gated


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer": 3}, "Did you mean layers"),
        ({"layers": 0}, "from 1 on"),
        ({"heads": "many"}, "whole number"),
        ({"kv_heads": 3}, "do not divide"),
        ({"experts": 4, "topk": 8, "expert_hidden": 32}, "8 of 4 experts"),
        ({"hidden": 65}, "head_dim"),
        ({"mla": {"rank": 3}}, "kv_rank"),
    ],
)
def test_nonsense_is_refused(change: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        from_dimensions({"layers": 2, "hidden": 64, "heads": 4, "vocab": 100} | change, "mine.yaml", "mine")


def test_keys_a_token_sees() -> None:
    full = load_model("llama-3-8b").layers[0].attention
    assert attended(full, 4096) == pytest.approx(2048.5)
    windowed = load_model("gpt-oss-120b").layers[0].attention
    assert windowed.window == 128
    assert attended(windowed, 4096) == pytest.approx(128 - 128 * 127 / 2 / 4096)
    sparse = load_model("glm-5").layers[-1].attention
    assert attended(sparse, 65536) == pytest.approx(2048, rel=0.02)
