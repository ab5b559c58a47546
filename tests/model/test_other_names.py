"""Families that `transformers` knows under another name: the same weights, renamed as they were released."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import moesaic
from moesaic.errors import UserError
from moesaic.model import directory
from tests.model import oracle

TOKENS = [5, 17, 3, 90, 41, 41, 8, 22, 63, 7, 11]
# GLM-4-9B as first released, beside the names that `transformers` gives the same tensors.
CHATGLM = [
    (r"model\.embed_tokens", "transformer.embedding.word_embeddings"),
    (r"model\.norm", "transformer.encoder.final_layernorm"),
    (r"lm_head", "transformer.output_layer"),
    (r"model\.layers\.(\d+)\.self_attn\.o_proj", r"transformer.encoder.layers.\1.self_attention.dense"),
    (r"model\.layers\.(\d+)\.mlp\.gate_up_proj", r"transformer.encoder.layers.\1.mlp.dense_h_to_4h"),
    (r"model\.layers\.(\d+)\.mlp\.down_proj", r"transformer.encoder.layers.\1.mlp.dense_4h_to_h"),
    (r"model\.layers\.(\d+)\.(\w+)_layernorm", r"transformer.encoder.layers.\1.\2_layernorm"),
]


def chatglm(case: str, path: Path, **changes: object) -> torch.Tensor:
    """A checkpoint in ChatGLM's form, and the logits `transformers` has for it under its own name."""
    theirs = oracle.save(case, path)
    config, tensors = theirs.config, load_file(path / "model.safetensors")
    renamed = {}
    for name, tensor in tensors.items():
        for old, new in CHATGLM:
            if re.match(old, name):
                renamed[re.sub(old, new, name)] = tensor
    for layer in range(config.num_hidden_layers):
        for kind in ("weight", "bias") if config.attention_bias else ("weight",):
            parts = [tensors[f"model.layers.{layer}.self_attn.{part}_proj.{kind}"] for part in "qkv"]
            renamed[f"transformer.encoder.layers.{layer}.self_attention.query_key_value.{kind}"] = torch.cat(parts)
    renamed["transformer.rotary_pos_emb.inv_freq"] = torch.ones(4)  # as the release has it, for nothing
    save_file(renamed, path / "model.safetensors")
    raw = {
        "model_type": "chatglm",
        "num_layers": config.num_hidden_layers,
        "padded_vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": config.intermediate_size,
        "kv_channels": config.head_dim,
        "num_attention_heads": config.num_attention_heads,
        "multi_query_attention": True,
        "multi_query_group_num": config.num_key_value_heads,
        "add_qkv_bias": config.attention_bias,
        "add_bias_linear": False,
        "layernorm_epsilon": config.rms_norm_eps,
        "rope_ratio": config.rope_parameters["rope_theta"] / 10_000,
        "seq_length": config.max_position_embeddings,
        "rmsnorm": True,
        "eos_token_id": [2],
        "torch_dtype": "float32",
    }
    (path / "config.json").write_text(json.dumps(raw | changes))
    return oracle.logits(theirs, TOKENS)


@pytest.mark.parametrize("case", ["glm", "glm-odd-theta"])
def test_chatglm_is_glm(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = oracle.CASES["glm"] | {
        "attention_bias": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
    }
    monkeypatch.setitem(oracle.CASES, "glm-odd-theta", odd)
    expected = chatglm(case, tmp_path / "their")
    model = moesaic.load(tmp_path / "their")
    assert model.config.family == "chatglm"
    torch.testing.assert_close(model.logits([TOKENS])[0], expected, rtol=1e-3, atol=1e-4)
    directory.save(model, tmp_path / "our")
    stored = load_file(tmp_path / "our" / "model.safetensors")
    released = load_file(tmp_path / "their" / "model.safetensors")
    assert all(torch.equal(stored[name], released[name]) for name in stored) and len(stored) == len(released) - 1


@pytest.mark.parametrize("change", [{"rmsnorm": False}, {"add_bias_linear": True}, {"multi_query_group_num": None}])
def test_a_chatglm_of_another_kind_is_refused(change: dict[str, object], tmp_path: Path) -> None:
    chatglm("glm", tmp_path / "their", **change)
    with pytest.raises(UserError, match=next(iter(change))):
        moesaic.load(tmp_path / "their")


@pytest.mark.parametrize("case", ["deepseek_v3", "deepseek_v3-yarn"])
def test_kimi_is_deepseek(case: str, tmp_path: Path) -> None:
    theirs = oracle.save(case, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "kimi_k2"}))
    model = moesaic.load(tmp_path)
    assert model.config.family == "kimi_k2"
    torch.testing.assert_close(model.logits([TOKENS])[0], oracle.logits(theirs, TOKENS), rtol=1e-3, atol=1e-4)


def test_kimi_with_the_keys_of_its_release(tmp_path: Path) -> None:
    """Keys of DeepSeek's own code, rotation in the older spelling, and YaRN whose ramp is a step (both betas are 1)."""
    yarn = {"rope_type": "yarn", "rope_theta": 50000.0, "factor": 32.0, "original_max_position_embeddings": 64}
    yarn |= {"beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    theirs = oracle.save("deepseek_v3-yarn", tmp_path, rope_parameters=yarn, n_group=1, topk_group=1)
    config = json.loads((tmp_path / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": {"type": rope.pop("rope_type"), **rope}}
    config |= {"aux_loss_alpha": 0.001, "seq_aux": True, "ep_size": 1, "moe_layer_freq": 1, "pretraining_tp": 1}
    config |= {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "num_nextn_predict_layers": 0}
    config |= {"model_type": "kimi_k2", "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = moesaic.load(tmp_path)
    assert model.config.rope.beta_fast == model.config.rope.beta_slow == 1.0
    torch.testing.assert_close(model.logits([TOKENS])[0], oracle.logits(theirs, TOKENS), rtol=1e-3, atol=1e-4)


def test_ernie_as_released(tmp_path: Path) -> None:
    """An expert a tensor, and the balance bias beside the router; the layers for further tokens are left."""
    theirs = oracle.save("ernie4_5_moe", tmp_path / "their")
    model = moesaic.load(tmp_path / "their")
    directory.save(model, tmp_path / "our")
    stored = load_file(tmp_path / "our" / "model.safetensors")
    assert stored["model.layers.1.mlp.moe_statics.e_score_correction_bias"].shape == (1, 6)
    assert stored["model.layers.1.mlp.experts.5.down_proj.weight"].shape == (48, 20)
    save_file(stored | {"model.mtp_linear_proj.0.weight": torch.ones(2, 2)}, tmp_path / "our" / "model.safetensors")
    again = moesaic.load(tmp_path / "our")
    torch.testing.assert_close(again.logits([TOKENS])[0], oracle.logits(theirs, TOKENS), rtol=1e-3, atol=1e-4)
