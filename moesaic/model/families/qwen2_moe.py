"""Qwen2-MoE (Qwen1.5-MoE too): biased queries, keys and values, and a shared expert of which a token takes a learned
share."""

from __future__ import annotations

from typing import Any

from moesaic.model.config import Dense, Experts, GroupedQuery, Layer, ModelConfig
from moesaic.model.families.keys import Keys, write_grouped_query
from moesaic.model.families.places import Names, Place, places
from moesaic.model.families.traits import Traits

ARCHITECTURE = "Qwen2MoeForCausalLM"
TRAITS = Traits(qkv_bias=True, shared_gate=True)
NEAR, FAR = "sliding_attention", "full_attention"


def read(keys: Keys) -> ModelConfig:
    attention = keys.grouped_query(kv_heads=16, qkv_bias=keys.flag("qkv_bias", default=True))
    context = keys.integer("max_position_embeddings", default=32768)
    experts = Experts(
        count=keys.integer("num_experts", "num_local_experts", default=60),
        per_token=keys.integer("num_experts_per_tok", default=4),
        hidden=keys.integer("moe_intermediate_size", default=1408),
        normalize=keys.flag("norm_topk_prob", default=False),
        shared_hidden=keys.integer("shared_expert_intermediate_size", default=5632),
        shared_gate=True,
    )
    dense, count = Dense(keys.integer("intermediate_size", default=5632)), keys.layer_count()
    always_dense, step = keys.tokens("mlp_only_layers"), max(keys.integer("decoder_sparse_step", default=1), 1)
    window = keys.integer("sliding_window", default=4096) if keys.flag("use_sliding_window", default=False) else None
    below = keys.integer("max_window_layers", default=28)
    near = [NEAR if number % 2 == 0 and number < below else FAR for number in range(count)]
    kinds = keys.choices("layer_types", {NEAR, FAR}, count) or near
    return ModelConfig(
        family="qwen2_moe",
        attention=attention,
        rope=keys.rope(attention.head_size, context=context),
        layers=tuple(
            Layer(
                dense if number in always_dense or (number + 1) % step else experts,
                window if kinds[number] == NEAR else None,
            )
            for number in range(count)
        ),
        **keys.every(context, eps=1e-6),
    )


def write(config: ModelConfig) -> dict[str, Any]:
    attention = config.attention
    experts = next((layer.ffn for layer in config.layers if isinstance(layer.ffn, Experts)), None)
    dense = [number for number, layer in enumerate(config.layers) if isinstance(layer.ffn, Dense)]
    if not isinstance(attention, GroupedQuery) or experts is None:
        return {}
    windows = [layer.window for layer in config.layers]
    return {
        **write_grouped_query(config, attention),
        "intermediate_size": config.layers[dense[0]].ffn.hidden if dense else experts.hidden,
        "qkv_bias": attention.qkv_bias,
        "use_sliding_window": any(windows),
        "sliding_window": next((window for window in windows if window), None),
        "layer_types": [NEAR if window else FAR for window in windows],
        "num_experts": experts.count,
        "num_experts_per_tok": experts.per_token,
        "moe_intermediate_size": experts.hidden,
        "shared_expert_intermediate_size": experts.shared_hidden,
        "norm_topk_prob": experts.normalize,
        "mlp_only_layers": dense,
        "decoder_sparse_step": 1,
    }


def layouts(config: ModelConfig) -> list[list[Place]]:
    return [places(config, Names(shared="shared_expert", fused_experts=fused)) for fused in (False, True)]
