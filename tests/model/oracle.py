"""Tiny random checkpoints made by `transformers`, which nobody here wrote: three or more for each family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from tests.model.mixture_cases import GQA, LLAMA3, MIXTURE_CASES, YARN

SMALL: dict[str, Any] = {"vocab_size": 97, "max_position_embeddings": 64, "initializer_range": 0.2}
MLA = {
    "hidden_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 3,
    "intermediate_size": 56,
    "moe_intermediate_size": 24,
    "kv_lora_rank": 20,
    "q_lora_rank": 28,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 14,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
}
# Many index heads, so that no rectified score is exactly zero: `transformers` breaks such ties at random.
DSA = MLA | {"index_n_heads": 17, "index_head_dim": 16, "index_topk": 5, "v_head_dim": 12}
QWEN_MOE = GQA | {
    "intermediate_size": 60,
    "moe_intermediate_size": 20,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "head_dim": 16,
}
GLM_MOE = GQA | {
    "intermediate_size": 60,
    "moe_intermediate_size": 20,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "head_dim": 16,
    "num_hidden_layers": 3,
    "num_mtp_layers": 0,
}
ERNIE = GQA | {
    "num_hidden_layers": 3,
    "intermediate_size": 60,
    "moe_intermediate_size": 20,
    "moe_num_experts": 6,
    "moe_k": 2,
    "pad_token_id": 0,
}
CASES: dict[str, dict[str, Any]] = {
    "llama-tied": {"model_type": "llama", **GQA, "intermediate_size": 64, "tie_word_embeddings": True},
    "llama-llama3-biases": {
        "model_type": "llama",
        **GQA,
        "intermediate_size": 50,
        "attention_bias": True,
        "mlp_bias": True,
        "rope_parameters": LLAMA3,
    },
    "llama-linear-odd": {
        "model_type": "llama",
        **GQA,
        "hidden_size": 42,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 10,
        "intermediate_size": 37,
        "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
    },
    "llama-dynamic": {
        "model_type": "llama",
        **GQA,
        "intermediate_size": 50,
        "max_position_embeddings": 12,
        "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
    },
    "llama-yarn": {"model_type": "llama", **GQA, "intermediate_size": 50, "rope_parameters": YARN},
    "qwen3-tied": {"model_type": "qwen3", **GQA, "intermediate_size": 64, "head_dim": 16, "tie_word_embeddings": True},
    "qwen3-window": {
        "model_type": "qwen3",
        **GQA,
        "num_hidden_layers": 4,
        "intermediate_size": 64,
        "head_dim": 14,
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 2,
    },
    "qwen3-yarn-biases": {
        "model_type": "qwen3",
        **GQA,
        "intermediate_size": 33,
        "head_dim": 16,
        "attention_bias": True,
        "rope_parameters": YARN,
    },
    "glm4": {"model_type": "glm4", **GQA, "intermediate_size": 64, "head_dim": 16, "pad_token_id": 0},
    "glm4-tied-full-rotary": {
        "model_type": "glm4",
        **GQA,
        "intermediate_size": 33,
        "head_dim": 12,
        "pad_token_id": 0,
        "attention_bias": False,
        "tie_word_embeddings": True,
        "partial_rotary_factor": 1.0,
    },
    "glm4-odd": {
        "model_type": "glm4",
        **GQA,
        "hidden_size": 54,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "intermediate_size": 41,
        "head_dim": 20,
        "pad_token_id": 0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.3},
    },
    "mixtral": {"model_type": "mixtral", **GQA, "intermediate_size": 20, "num_local_experts": 4},
    "mixtral-window-tied": {
        "model_type": "mixtral",
        **GQA,
        "intermediate_size": 21,
        "num_local_experts": 5,
        "num_experts_per_tok": 3,
        "sliding_window": 4,
        "tie_word_embeddings": True,
    },
    "mixtral-top1": {
        "model_type": "mixtral",
        **GQA,
        "intermediate_size": 24,
        "num_local_experts": 3,
        "num_experts_per_tok": 1,
        "head_dim": 10,
    },
    "qwen3_moe": {"model_type": "qwen3_moe", **QWEN_MOE},
    "qwen3_moe-normalised-mixed": {
        "model_type": "qwen3_moe",
        **QWEN_MOE,
        "norm_topk_prob": True,
        "num_hidden_layers": 4,
        "mlp_only_layers": [2],
        "decoder_sparse_step": 2,
        "tie_word_embeddings": True,
        "attention_bias": True,
    },
    "qwen3_moe-window": {
        "model_type": "qwen3_moe",
        **QWEN_MOE,
        "use_sliding_window": True,
        "sliding_window": 6,
        "num_experts": 5,
        "num_experts_per_tok": 5,
        "moe_intermediate_size": 13,
        "rope_parameters": YARN,
    },
    "glm4_moe": {"model_type": "glm4_moe", **GLM_MOE},
    "glm4_moe-groups": {
        "model_type": "glm4_moe",
        **GLM_MOE,
        "n_routed_experts": 8,
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 3,
        "use_qk_norm": True,
        "attention_bias": True,
        "routed_scaling_factor": 2.5,
        "n_shared_experts": 2,
        "tie_word_embeddings": True,
    },
    "glm4_moe-plain-weights": {
        "model_type": "glm4_moe",
        **GLM_MOE,
        "norm_topk_prob": False,
        "first_k_dense_replace": 0,
        "moe_intermediate_size": 17,
        "hidden_size": 44,
        "partial_rotary_factor": 0.25,
    },
    "deepseek_v3": {"model_type": "deepseek_v3", **MLA, "n_group": 2, "topk_group": 1, "num_mtp_layers": 0},
    "deepseek_v3-yarn": {
        "model_type": "deepseek_v3",
        **MLA,
        "n_group": 4,
        "topk_group": 2,
        "num_mtp_layers": 0,
        "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.7},
        "attention_bias": True,
        "tie_word_embeddings": True,
    },
    "deepseek_v3-no-query-rank": {
        "model_type": "deepseek_v3",
        **MLA,
        "q_lora_rank": None,
        "n_group": 1,
        "topk_group": 1,
        "num_mtp_layers": 0,
        "rope_interleave": False,
        "v_head_dim": 24,
        "first_k_dense_replace": 0,
        "norm_topk_prob": False,
    },
    "glm_moe_dsa": {"model_type": "glm_moe_dsa", **DSA},
    "glm_moe_dsa-shared": {
        "model_type": "glm_moe_dsa",
        **DSA,
        "num_hidden_layers": 5,
        "indexer_types": ["full", "shared", "full", "shared", "shared"],
        "mlp_layer_types": ["dense", "sparse", "sparse", "dense", "sparse"],
        "index_topk": 3,
        "tie_word_embeddings": True,
    },
    "glm_moe_dsa-frequency": {
        "model_type": "glm_moe_dsa",
        **DSA,
        "num_hidden_layers": 5,
        "index_topk_freq": 3,
        "n_group": 2,
        "topk_group": 1,
        "attention_bias": True,
        "rope_parameters": YARN | {"mscale_all_dim": 1.0},
    },
    "deepseek_v32": {"model_type": "deepseek_v32", **DSA, "n_group": 2, "topk_group": 1},
    "deepseek_v32-yarn": {
        "model_type": "deepseek_v32",
        **DSA,
        "n_group": 4,
        "topk_group": 2,
        "index_topk": 3,
        "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.7},
        "tie_word_embeddings": True,
    },
    "deepseek_v32-all-sparse": {
        "model_type": "deepseek_v32",
        **DSA,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 0,
        "norm_topk_prob": False,
        "attention_bias": True,
        "n_shared_experts": 2,
    },
    "glm": {"model_type": "glm", **GQA, "intermediate_size": 64, "head_dim": 16, "pad_token_id": 0},
    "glm-tied-full-rotary": {
        "model_type": "glm",
        **GQA,
        "intermediate_size": 33,
        "head_dim": 12,
        "pad_token_id": 0,
        "attention_bias": False,
        "tie_word_embeddings": True,
        "partial_rotary_factor": 1.0,
    },
    "glm-odd": {
        "model_type": "glm",
        **GQA,
        "hidden_size": 54,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "intermediate_size": 41,
        "head_dim": 20,
        "pad_token_id": 0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.3},
    },
    "ernie4_5_moe": {"model_type": "ernie4_5_moe", **ERNIE},
    "ernie4_5_moe-interval": {
        "model_type": "ernie4_5_moe",
        **ERNIE,
        "num_hidden_layers": 5,
        "moe_layer_interval": 2,
        "moe_layer_end_index": 3,
        "moe_num_shared_experts": 1,
        "tie_word_embeddings": False,
    },
    "ernie4_5_moe-no-shared": {
        "model_type": "ernie4_5_moe",
        **ERNIE,
        "moe_layer_start_index": 0,
        "moe_num_shared_experts": 0,
        "moe_k": 1,
        "hidden_size": 42,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    },
}
CASES |= MIXTURE_CASES


BERT = {"hidden_size": 48, "num_attention_heads": 4, "num_hidden_layers": 3, "intermediate_size": 64}
LOCAL = BERT | {"num_hidden_layers": 4, "local_attention": 8, "cls_token_id": 1, "sep_token_id": 2, "pad_token_id": 0}
ENCODER_CASES: dict[str, dict[str, Any]] = {
    "bert": {"model_type": "bert", **BERT},
    "bert-odd": {
        "model_type": "bert", **BERT, "hidden_size": 42, "num_attention_heads": 3, "intermediate_size": 37,
        "hidden_act": "gelu_new", "type_vocab_size": 3, "layer_norm_eps": 1e-5,
    },
    "bert-scores": {"model_type": "bert", **BERT, "num_labels": 1, "hidden_act": "relu"},
    "modernbert": {"model_type": "modernbert", **LOCAL},
    "modernbert-biases": {
        "model_type": "modernbert", **LOCAL, "norm_bias": True, "attention_bias": True, "mlp_bias": True,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    },
    "modernbert-scores": {
        "model_type": "modernbert", **LOCAL, "num_labels": 1, "classifier_pooling": "mean", "classifier_bias": True,
        "norm_bias": True,
    },
}  # fmt: skip


def make_encoder(case: str) -> transformers.PreTrainedModel:
    """With a head where the case says how many labels it has."""
    settings = dict(SMALL, **ENCODER_CASES[case])
    config = transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)
    auto = transformers.AutoModelForSequenceClassification if "num_labels" in settings else transformers.AutoModel
    torch.manual_seed(0)
    model = auto.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for tensor in model.parameters():
            if tensor.dim() == 1:
                tensor.add_(torch.randn_like(tensor) * 0.1)
    return model


def make(case: str, seed: int = 0, **more: Any) -> transformers.PreTrainedModel:
    """A random model in which every number matters: norms, biases and balance corrections are random too. `more` are
    keys of its config.json."""
    settings = dict(SMALL, **CASES[case]) | more
    config = transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)
    config.bos_token_id, config.eos_token_id = 1, 2
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            row = tensor.dim() == 1 or name.endswith("e_score_correction_bias")
            if row and tensor.is_floating_point() and tensor.numel() not in (config.vocab_size,):
                tensor.add_(torch.randn_like(tensor) * 0.1)
    restore_rope(model)
    return model


def restore_rope(model: transformers.PreTrainedModel) -> None:
    """The rotary frequencies are buffers too, and not weights: put them back."""
    rotary = model.model.rotary_emb
    rotary.__init__(config=model.config)


def save(case: str, path: Path, seed: int = 0, **more: Any) -> transformers.PreTrainedModel:
    model = make(case, seed, **more)
    model.save_pretrained(path)
    return model


@torch.no_grad()
def logits(model: transformers.PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    restore_rope(model)  # dynamic scaling remembers the longest sequence it has seen
    return model(torch.tensor([tokens]), use_cache=False).logits[0]
