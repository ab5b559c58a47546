"""Hunyuan (A13B, Large): heads are normed once they are rotated; softmax router, one shared expert."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from moesaic.model.config import Experts, GroupedQuery, Layer, ModelConfig
from moesaic.model.families.keys import Keys, write_grouped_query
from moesaic.model.families.places import Names, Place, places
from moesaic.model.families.traits import Traits

ARCHITECTURE = "HunYuanMoEV1ForCausalLM"
TRAITS = Traits(norm="rotated")


def read(keys: Keys) -> ModelConfig:
    bias = keys.flag("attention_bias", default=False)
    attention = keys.grouped_query(qkv_bias=bias, out_bias=bias, qk_norm=True, norm="rotated")
    context, width = keys.integer("max_position_embeddings", default=2048), keys.integer("intermediate_size")
    experts = Experts(
        count=_same(keys, "num_experts"), per_token=_same(keys, "moe_topk"), hidden=width, shared_hidden=width
    )
    return ModelConfig(
        family="hunyuan_v1_moe",
        attention=attention,
        rope=_rope(keys, attention.head_size, context),
        layers=(Layer(experts),) * keys.layer_count(),
        **keys.every(context, eps=1e-5),
    )


def _same(keys: Keys, name: str) -> int:
    """A number, or one for each layer, which must be the same."""
    value = keys.raw.get(name)
    if isinstance(value, list) and value and all(one == value[0] for one in value):
        keys = Keys({**keys.raw, name: value[0]}, keys.place)
    return keys.integer(name, default=1)


def _rope(keys: Keys, size: int, context: int) -> Any:
    """Releases stretch the context by `alpha`, which is another base and nothing else."""
    key = "rope_scaling" if keys.raw.get("rope_scaling") else "rope_parameters"
    raw = keys.raw.get(key) or {}
    if not isinstance(raw, dict) or not raw.get("alpha"):
        return keys.rope(size, context=context)
    alpha = Keys(raw, keys.place).number("alpha")
    plain = {name: value for name, value in raw.items() if name == "rope_theta"} | {"rope_type": "default"}
    rope = Keys({**keys.raw, key: plain}, keys.place).rope(size, context=context)
    return replace(rope, theta=rope.theta * alpha ** (size / (size - 2)))


def write(config: ModelConfig) -> dict[str, Any]:
    attention, experts = config.attention, config.layers[0].ffn
    if not isinstance(attention, GroupedQuery) or not isinstance(experts, Experts):
        return {}
    return {
        **write_grouped_query(config, attention),
        "intermediate_size": experts.hidden,
        "attention_bias": attention.qkv_bias,
        "num_experts": experts.count,
        "moe_topk": experts.per_token,
    }


def layouts(config: ModelConfig) -> list[list[Place]]:
    names = {"router": "gate.wg", "shared": "shared_mlp", "q_norm": "query_layernorm", "k_norm": "key_layernorm"}
    return [places(config, Names(**names)), places(config, Names(**names, fused_experts=True))]  # type: ignore[arg-type]
