"""MiniMax-M2: sigmoid router with a balance bias, queries and keys normed as a whole, a part of each head turns."""

from __future__ import annotations

from typing import Any

from moesaic.model.config import Experts, GroupedQuery, Layer, ModelConfig
from moesaic.model.families.keys import Keys, write_grouped_query
from moesaic.model.families.places import Names, Place, places
from moesaic.model.families.traits import Traits

ARCHITECTURE = "MiniMaxM2ForCausalLM"
TRAITS = Traits(norm="whole")


def read(keys: Keys) -> ModelConfig:
    attention = keys.grouped_query(kv_heads=8, head_size=128, qk_norm=True, norm="whole")
    context = keys.integer("max_position_embeddings", default=196608)
    experts = Experts(
        count=keys.integer("num_local_experts", "num_experts", default=256),
        per_token=keys.integer("num_experts_per_tok", default=8),
        hidden=keys.integer("intermediate_size", default=1536),
        score="sigmoid",
        correction=True,
    )
    turning = keys.integer("rotary_dim", default=attention.head_size) / max(attention.head_size, 1)  # as released
    return ModelConfig(
        family="minimax_m2",
        attention=attention,
        rope=keys.rope(attention.head_size, context=context, share=turning, theta=5e6),
        layers=(Layer(experts),) * keys.layer_count(),
        **keys.every(context, eps=1e-6),
    )


def write(config: ModelConfig) -> dict[str, Any]:
    attention, experts = config.attention, config.layers[0].ffn
    if not isinstance(attention, GroupedQuery) or not isinstance(experts, Experts):
        return {}
    return {
        **write_grouped_query(config, attention, partial=True),
        "intermediate_size": experts.hidden,
        "num_local_experts": experts.count,
        "num_experts_per_tok": experts.per_token,
    }


def layouts(config: ModelConfig) -> list[list[Place]]:
    correction = "e_score_correction_bias"
    released = Names(mixture="block_sparse_moe", gate="w1", up="w3", down="w2", correction=correction)
    return [places(config, released), places(config, Names(fused_experts=True, correction=correction))]
