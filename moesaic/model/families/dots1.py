"""dots.llm1: the mixture of DeepSeek-V3 (sigmoid router with a balance bias, shared experts) over Qwen3's attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from moesaic.model.config import Experts, GroupedQuery, ModelConfig
from moesaic.model.families.keys import Keys, write_grouped_query
from moesaic.model.families.places import Names, Place, places
from moesaic.model.families.sigmoid import read_layers, write_layers
from moesaic.model.families.traits import Traits

ARCHITECTURE = "Dots1ForCausalLM"
TRAITS = Traits()
NEAR, FAR = "sliding_attention", "full_attention"


def read(keys: Keys) -> ModelConfig:
    bias = keys.flag("attention_bias", default=False)
    attention = keys.grouped_query(kv_heads=32, qkv_bias=bias, out_bias=bias, qk_norm=True)
    context = keys.integer("max_position_embeddings", default=2048)
    layers, mtp = read_layers(keys, dense_first=0, groups=1, top_groups=1, scale=1.0, normalize=False)
    window, below = keys.maybe_integer("sliding_window"), keys.integer("max_window_layers", default=62)
    far = [NEAR if window and number >= below else FAR for number in range(len(layers))]
    kinds = keys.choices("layer_types", {NEAR, FAR}, len(layers)) or far
    return ModelConfig(
        family="dots1",
        attention=attention,
        rope=keys.rope(attention.head_size, context=context),
        layers=tuple(replace(layer, window=window if kind == NEAR else None) for layer, kind in zip(layers, kinds)),
        mtp=mtp,
        **keys.every(context, eps=1e-6),
    )


def write(config: ModelConfig) -> dict[str, Any]:
    attention = config.attention
    if not isinstance(attention, GroupedQuery) or not isinstance(config.layers[-1].ffn, Experts):
        return {}
    windows = [layer.window for layer in config.layers]
    return {
        **write_grouped_query(config, attention),
        **write_layers(config),
        "attention_bias": attention.qkv_bias,
        "sliding_window": next((window for window in windows if window), None),
        "layer_types": [NEAR if window else FAR for window in windows],
    }


def layouts(config: ModelConfig) -> list[list[Place]]:
    return [places(config, Names(fused_experts=fused)) for fused in (False, True)]
