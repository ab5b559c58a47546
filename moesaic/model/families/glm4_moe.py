"""GLM-4.5: sigmoid router with a balance bias, a shared expert, dense first layers, half of each head turns, MTP."""

from __future__ import annotations

from typing import Any

from moesaic.model.config import Dense, GroupedQuery, ModelConfig
from moesaic.model.families.keys import Keys, write_grouped_query
from moesaic.model.families.places import Names, Place, places
from moesaic.model.families.sigmoid import SIGMOID, gguf_feed_forward, gguf_routing, read_layers, write_layers
from moesaic.model.families.traits import GGUF, GGUFReader, Traits, attention_parts

ARCHITECTURE = "Glm4MoeForCausalLM"
TRAITS = Traits(rotary_share=0.5)


def read(keys: Keys) -> ModelConfig:
    bias, norm = keys.flag("attention_bias", default=False), keys.flag("use_qk_norm", default=False)
    attention = keys.grouped_query(kv_heads=8, qkv_bias=bias, qk_norm=norm)
    context = keys.integer("max_position_embeddings", default=131072)
    layers, mtp = read_layers(keys, dense_first=1, groups=1, top_groups=1, scale=1.0)
    return ModelConfig(
        family="glm4_moe",
        attention=attention,
        rope=keys.rope(attention.head_size, context=context, share=0.5),
        layers=layers,
        mtp=mtp,
        **keys.every(context, eps=1e-5),
    )


def write(config: ModelConfig) -> dict[str, Any]:
    attention = config.attention
    if not isinstance(attention, GroupedQuery) or isinstance(config.layers[-1].ffn, Dense):
        return {}
    return {
        **write_grouped_query(config, attention, partial=True),
        **write_layers(config),
        "attention_bias": attention.qkv_bias,
        "use_qk_norm": attention.qk_norm,
    }


def layouts(config: ModelConfig) -> list[list[Place]]:
    return [places(config, Names()), places(config, Names(fused_experts=True))]


def gguf_parts(config: dict[str, Any], layer: int) -> list[str]:
    norms = ["qk_norm"] if config["use_qk_norm"] else []
    further = ["next_tokens"] if layer >= config["num_hidden_layers"] else []
    return ["own", *attention_parts(config, out_bias=False), *norms, *gguf_feed_forward(config, layer), *further]


def gguf_config(reader: GGUFReader) -> dict[str, Any]:
    further = reader.integer("nextn_predict_layers", 0, least=0)
    norms = {"use_qk_norm": reader.has("blk.0.attn_q_norm.weight"), "num_nextn_predict_layers": further}
    return norms | gguf_routing(reader, default=SIGMOID)


GGUF_TABLE = """
attn_norm.weight            input_layernorm.weight           D
post_attention_norm.weight  post_attention_layernorm.weight  D
"""
GGUF_NAMES = GGUF(
    "glm4moe", gguf_parts, gguf_config, GGUF_TABLE, mixture=True, predicts_further=True, partial_rotary=True
)
