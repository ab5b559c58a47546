"""OLMoE: queries and keys are normed as a whole, all heads of a token as one vector; softmax router."""

from __future__ import annotations

from typing import Any

from moesaic.model.config import Experts, GroupedQuery, Layer, ModelConfig
from moesaic.model.families.keys import Keys, write_grouped_query
from moesaic.model.families.places import Names, Place, places
from moesaic.model.families.traits import Traits

ARCHITECTURE = "OlmoeForCausalLM"
TRAITS = Traits(norm="whole")


def read(keys: Keys) -> ModelConfig:
    if keys.raw.get("clip_qkv") is not None:
        raise keys.wrong("clip_qkv", "null (queries, keys and values are not clipped here)", keys.raw["clip_qkv"])
    bias = keys.flag("attention_bias", default=False)
    attention = keys.grouped_query(qkv_bias=bias, out_bias=bias, qk_norm=True, norm="whole")
    if attention.heads * attention.head_size != keys.integer("hidden_size"):
        raise keys.wrong("head_dim", "an equal share of hidden_size", attention.head_size)
    context = keys.integer("max_position_embeddings", default=4096)
    experts = Experts(
        count=keys.integer("num_experts", "num_local_experts", default=64),
        per_token=keys.integer("num_experts_per_tok", default=8),
        hidden=keys.integer("intermediate_size", default=2048),
        normalize=keys.flag("norm_topk_prob", default=False),
    )
    return ModelConfig(
        family="olmoe",
        attention=attention,
        rope=keys.rope(attention.head_size, context=context),
        layers=(Layer(experts),) * keys.layer_count(),
        **keys.every(context, eps=1e-5),
    )


def write(config: ModelConfig) -> dict[str, Any]:
    attention, experts = config.attention, config.layers[0].ffn
    if not isinstance(attention, GroupedQuery) or not isinstance(experts, Experts):
        return {}
    return {
        **write_grouped_query(config, attention),
        "intermediate_size": experts.hidden,
        "attention_bias": attention.qkv_bias,
        "num_experts": experts.count,
        "num_experts_per_tok": experts.per_token,
        "norm_topk_prob": experts.normalize,
    }


def layouts(config: ModelConfig) -> list[list[Place]]:
    return [places(config, Names(fused_experts=fused)) for fused in (False, True)]
