"""Cases of `oracle.py`: mixtures with parts of their own."""

from __future__ import annotations

from typing import Any

GQA = {"hidden_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
GPT_OSS = GQA | {
    "num_hidden_layers": 3,
    "intermediate_size": 20,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "head_dim": 16,
    "sliding_window": 5,
    "rope_parameters": YARN | {"truncate": False},
}

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 24,
}
LLAMA4 = GQA | {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "intermediate_size": 20,
    "intermediate_size_mlp": 36,
    "num_local_experts": 6,
    "attention_chunk_size": 6,
    "floor_scale": 4,
    "attn_scale": 0.3,
}
QWEN2 = GQA | {
    "intermediate_size": 60,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 28,
    "num_experts": 6,
    "num_experts_per_tok": 2,
}
OLMOE = GQA | {"intermediate_size": 20, "num_experts": 6, "num_experts_per_tok": 2}
MINIMAX = GQA | {
    "intermediate_size": 20,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "head_dim": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
}
HUNYUAN = GQA | {"intermediate_size": 20, "num_experts": 6, "moe_topk": 2, "head_dim": 16}
DOTS = GQA | {
    "num_hidden_layers": 3,
    "intermediate_size": 60,
    "moe_intermediate_size": 20,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "head_dim": 16,
    "first_k_dense_replace": 1,
    "sliding_window": None,
}

MIXTURE_CASES: dict[str, dict[str, Any]] = {
    "gpt_oss": {"model_type": "gpt_oss", **GPT_OSS},
    "gpt_oss-odd": {
        "model_type": "gpt_oss",
        **GPT_OSS,
        "hidden_size": 42,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 10,
        "intermediate_size": 19,
        "num_experts_per_tok": 1,
        "attention_bias": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    },
    "gpt_oss-tied": {
        "model_type": "gpt_oss",
        **GPT_OSS,
        "num_hidden_layers": 2,
        "layer_types": ["full_attention"] * 2,
        "tie_word_embeddings": True,
        "initializer_range": 1.0,
    },
    "llama4_text": {"model_type": "llama4_text", **LLAMA4},
    "llama4_text-dense-layers": {
        "model_type": "llama4_text",
        **LLAMA4,
        "interleave_moe_layer_step": 2,
        "use_qk_norm": False,
        "attn_temperature_tuning": False,
        "attention_bias": True,
        "no_rope_layers": [0, 1, 0, 1],
        "tie_word_embeddings": True,
    },
    "llama4_text-odd": {
        "model_type": "llama4_text",
        **LLAMA4,
        "hidden_size": 42,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 10,
        "intermediate_size": 19,
        "attention_chunk_size": 7,
        "no_rope_layer_interval": 2,
        "attn_scale": 0.7,
        "rope_parameters": LLAMA3,
    },
    "qwen2_moe": {"model_type": "qwen2_moe", **QWEN2},
    "qwen2_moe-window": {
        "model_type": "qwen2_moe",
        **QWEN2,
        "num_hidden_layers": 4,
        "use_sliding_window": True,
        "sliding_window": 5,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
        "tie_word_embeddings": True,
    },
    "qwen2_moe-odd": {
        "model_type": "qwen2_moe",
        **QWEN2,
        "hidden_size": 42,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "num_experts_per_tok": 1,
        "qkv_bias": False,
        "shared_expert_intermediate_size": 11,
        "decoder_sparse_step": 2,
    },
    "olmoe": {"model_type": "olmoe", **OLMOE},
    "olmoe-biases": {"model_type": "olmoe", **OLMOE, "attention_bias": True, "norm_topk_prob": True},
    "olmoe-odd": {
        "model_type": "olmoe",
        **OLMOE,
        "hidden_size": 42,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "num_experts_per_tok": 1,
        "tie_word_embeddings": True,
    },
    "minimax_m2": {"model_type": "minimax_m2", **MINIMAX},
    "minimax_m2-whole-heads": {"model_type": "minimax_m2", **MINIMAX, "rope_parameters": YARN},
    "minimax_m2-odd": {
        "model_type": "minimax_m2",
        **MINIMAX,
        "hidden_size": 42,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 20,
        "num_experts_per_tok": 1,
        "tie_word_embeddings": True,
    },
    "hunyuan_v1_moe": {"model_type": "hunyuan_v1_moe", **HUNYUAN},
    "hunyuan_v1_moe-biases": {
        "model_type": "hunyuan_v1_moe",
        **HUNYUAN,
        "attention_bias": True,
        "tie_word_embeddings": True,
    },
    "hunyuan_v1_moe-odd": {
        "model_type": "hunyuan_v1_moe",
        **HUNYUAN,
        "hidden_size": 42,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 10,
        "moe_topk": 1,
    },
    "dots1": {"model_type": "dots1", **DOTS},
    "dots1-window": {
        "model_type": "dots1",
        **DOTS,
        "num_hidden_layers": 4,
        "sliding_window": 5,
        "max_window_layers": 2,
        "attention_bias": True,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
    },
    "dots1-groups": {
        "model_type": "dots1",
        **DOTS,
        "n_routed_experts": 8,
        "n_group": 4,
        "topk_group": 2,
        "n_shared_experts": 2,
        "tie_word_embeddings": True,
    },
}
