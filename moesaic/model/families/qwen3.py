"""Qwen3: dense, with normalised queries and keys, and sliding windows from some layer on."""

from __future__ import annotations

from typing import Any

from moesaic.model.config import Dense, GroupedQuery, Layer, ModelConfig
from moesaic.model.families.keys import Keys, write_grouped_query
from moesaic.model.families.places import Names, Place, places
from moesaic.model.families.traits import GGUF, Traits, attention_parts

ARCHITECTURE = "Qwen3ForCausalLM"
TRAITS = Traits(mixture="qwen3_moe")


def read(keys: Keys) -> ModelConfig:
    bias = keys.flag("attention_bias", default=False)
    attention = keys.grouped_query(head_size=128, qkv_bias=bias, out_bias=bias, qk_norm=True)
    context = keys.integer("max_position_embeddings", default=32768)
    count = keys.layer_count()
    window = keys.maybe_integer("sliding_window") if keys.flag("use_sliding_window", default=False) else None
    first = keys.integer("max_window_layers", default=28)
    kinds = keys.choices("layer_types", {"full_attention", "sliding_attention"}, count) or [
        "sliding_attention" if window and number >= first else "full_attention" for number in range(count)
    ]
    ffn = Dense(keys.integer("intermediate_size"))
    return ModelConfig(
        family="qwen3",
        attention=attention,
        rope=keys.rope(attention.head_size, context=context),
        layers=tuple(Layer(ffn, window if kind == "sliding_attention" else None) for kind in kinds[:count]),
        **keys.every(context, eps=1e-6),
    )


def write(config: ModelConfig) -> dict[str, Any]:
    attention, ffn = config.attention, config.layers[0].ffn
    if not isinstance(attention, GroupedQuery) or not isinstance(ffn, Dense):
        return {}
    window = next((layer.window for layer in config.layers if layer.window), None)
    return {
        **write_grouped_query(config, attention),
        "intermediate_size": ffn.hidden,
        "attention_bias": attention.qkv_bias,
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "max_window_layers": sum(layer.window is None for layer in config.layers),
        "layer_types": ["sliding_attention" if layer.window else "full_attention" for layer in config.layers],
    }


def layouts(config: ModelConfig) -> list[list[Place]]:
    return [places(config, Names())]


def gguf_parts(config: dict[str, Any], layer: int) -> list[str]:
    return ["norms", *attention_parts(config), "qk_norm", "dense"]


GGUF_NAMES = GGUF("qwen3", gguf_parts)
