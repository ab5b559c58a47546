"""GLM-4: dense, half of each head turns (neighbouring pairs), a second norm after each half of a layer."""

from __future__ import annotations

from typing import Any

from moesaic.model.config import Dense, GroupedQuery, Layer, ModelConfig
from moesaic.model.families.keys import Keys, write_grouped_query
from moesaic.model.families.places import Names, Place, places
from moesaic.model.families.traits import GGUF, Traits, attention_parts

ARCHITECTURE = "Glm4ForCausalLM"
TRAITS = Traits(rotary_share=0.5, interleaved=True, post_norms=True)


def read(keys: Keys) -> ModelConfig:
    bias = keys.flag("attention_bias", default=True)
    attention = keys.grouped_query(kv_heads=2, head_size=128, qkv_bias=bias)
    context = keys.integer("max_position_embeddings", default=131072)
    return ModelConfig(
        family="glm4",
        attention=attention,
        rope=keys.rope(attention.head_size, context=context, share=0.5, interleaved=True),
        layers=(Layer(Dense(keys.integer("intermediate_size"))),) * keys.layer_count(),
        post_norms=True,
        **keys.every(context, eps=1.5625e-7),
    )


def write(config: ModelConfig) -> dict[str, Any]:
    attention = config.attention
    if not isinstance(attention, GroupedQuery):
        return {}
    return {
        **write_grouped_query(config, attention, partial=True),
        "intermediate_size": config.layers[0].ffn.hidden,
        "attention_bias": attention.qkv_bias,
    }


def layouts(config: ModelConfig) -> list[list[Place]]:
    return [places(config, Names(fused_dense=True))]


def gguf_parts(config: dict[str, Any], layer: int) -> list[str]:
    return ["own", *attention_parts(config, out_bias=False)]


GGUF_TABLE = """
attn_norm.weight            input_layernorm.weight           D
post_attention_norm.weight  post_self_attn_layernorm.weight  D
ffn_norm.weight             post_attention_layernorm.weight  D
post_ffw_norm.weight        post_mlp_layernorm.weight        D
ffn_up.weight               mlp.gate_up_proj.weight          2I,D
ffn_down.weight             mlp.down_proj.weight             D,I
"""
GGUF_NAMES = GGUF("glm4", gguf_parts, table=GGUF_TABLE, partial_rotary=True)
