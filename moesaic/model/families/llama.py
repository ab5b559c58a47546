"""Llama and its many kin (SmolLM2 among them): dense, grouped-query."""

from __future__ import annotations

from typing import Any

from moesaic.model.config import Dense, GroupedQuery, Layer, ModelConfig
from moesaic.model.families.keys import Keys, write_grouped_query
from moesaic.model.families.places import Names, Place, places
from moesaic.model.families.traits import GGUF, GGUFReader, Traits, attention_parts

ARCHITECTURE = "LlamaForCausalLM"
TRAITS = Traits(mixture="mixtral")


def read(keys: Keys) -> ModelConfig:
    bias = keys.flag("attention_bias", default=False)
    attention = keys.grouped_query(qkv_bias=bias, out_bias=bias)
    context = keys.integer("max_position_embeddings", default=2048)
    ffn = Dense(keys.integer("intermediate_size"), keys.flag("mlp_bias", default=False))
    return ModelConfig(
        family="llama",
        attention=attention,
        rope=keys.rope(attention.head_size, context=context),
        layers=(Layer(ffn),) * keys.layer_count(),
        **keys.every(context, eps=1e-6),
    )


def write(config: ModelConfig) -> dict[str, Any]:
    attention, ffn = config.attention, config.layers[0].ffn
    if not isinstance(attention, GroupedQuery) or not isinstance(ffn, Dense):
        return {}
    return {
        **write_grouped_query(config, attention),
        "intermediate_size": ffn.hidden,
        "attention_bias": attention.qkv_bias,
        "mlp_bias": ffn.bias,
    }


def layouts(config: ModelConfig) -> list[list[Place]]:
    return [places(config, Names())]


def gguf_parts(config: dict[str, Any], layer: int) -> list[str]:
    return ["norms", *attention_parts(config), "dense", *(["dense_bias"] if config["mlp_bias"] else [])]


def gguf_config(reader: GGUFReader) -> dict[str, Any]:
    return {"mlp_bias": reader.has("blk.0.ffn_gate.bias")}


GGUF_NAMES = GGUF("llama", gguf_parts, gguf_config, rotates_neighbours=True)
