"""DeepSeek-V3: latent attention, sigmoid router with expert groups, shared expert, MTP."""

from __future__ import annotations

from typing import Any

from moesaic.model.config import Dense, Latent, ModelConfig
from moesaic.model.families.keys import Keys, write_every, write_rope
from moesaic.model.families.latent import gguf_latent, read_latent, write_latent
from moesaic.model.families.places import Names, Place, places
from moesaic.model.families.sigmoid import gguf_feed_forward, gguf_routing, read_layers, write_layers
from moesaic.model.families.traits import GGUF, GGUFReader, Traits

ARCHITECTURE = "DeepseekV3ForCausalLM"
TRAITS = Traits(interleaved=True, latent=True)


def read(keys: Keys) -> ModelConfig:
    attention = read_latent(keys)
    context = keys.integer("max_position_embeddings", default=4096)
    layers, mtp = read_layers(keys, dense_first=3, groups=8, top_groups=4, scale=2.5)
    interleaved = keys.flag("rope_interleave", default=True)
    return ModelConfig(
        family="deepseek_v3",
        attention=attention,
        rope=keys.rope(attention.rope_size, context=context, interleaved=interleaved),
        layers=layers,
        mtp=mtp,
        **keys.every(context, eps=1e-6),
    )


def write(config: ModelConfig) -> dict[str, Any]:
    attention = config.attention
    if not isinstance(attention, Latent) or isinstance(config.layers[-1].ffn, Dense):
        return {}
    return {
        **write_every(config),
        **write_rope(config.rope, attention.rope_size),
        **write_layers(config),
        **write_latent(attention),
        "rope_interleave": config.rope.interleaved,
    }


def layouts(config: ModelConfig) -> list[list[Place]]:
    return [places(config, Names()), places(config, Names(fused_experts=True))]


def gguf_parts(config: dict[str, Any], layer: int) -> list[str]:
    query = "query_rank" if config["q_lora_rank"] else "query"
    return ["norms", "latent", query, *gguf_feed_forward(config, layer)]


def gguf_config(reader: GGUFReader) -> dict[str, Any]:
    # Files of DeepSeek-V2 name no gating function and mean softmax.
    heads = {"num_key_value_heads": reader.sizes["H"], "num_nextn_predict_layers": 0}
    return heads | gguf_routing(reader, default=0) | gguf_latent(reader)


GGUF_NAMES = GGUF("deepseek2", gguf_parts, gguf_config, mixture=True, yarn_mscale=True)
