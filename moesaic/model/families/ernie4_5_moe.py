"""ERNIE-4.5: softmax router with a balance bias, shared experts, dense layers before and after the mixture."""

from __future__ import annotations

from math import gcd
from typing import Any

from moesaic.model.config import Dense, Experts, GroupedQuery, Layer, ModelConfig
from moesaic.model.families.keys import Keys, write_grouped_query
from moesaic.model.families.places import Names, Place, places
from moesaic.model.families.traits import Traits

ARCHITECTURE = "Ernie4_5_MoeForCausalLM"
TRAITS = Traits(interleaved=True)
# The bias lies beside the router here, and has a row for every kind of experts, of which a language model has one.
RELEASED = "moe_statics.e_score_correction_bias"


def read(keys: Keys) -> ModelConfig:
    if keys.flag("use_bias", default=False):
        raise keys.wrong("use_bias", "false", True)
    attention = keys.grouped_query(kv_heads=4)
    context = keys.integer("max_position_embeddings", default=131072)
    width = keys.integer("moe_intermediate_size", default=1536)
    experts = Experts(
        count=keys.integer("moe_num_experts", "num_experts", default=64),
        per_token=keys.integer("moe_k", "num_experts_per_tok", default=6),
        hidden=width,
        correction=True,
        shared_hidden=width * keys.integer("moe_num_shared_experts", default=2),
    )
    dense, count = Dense(keys.integer("intermediate_size", default=12288)), keys.layer_count()
    first, last = keys.integer("moe_layer_start_index", default=1), keys.integer("moe_layer_end_index", default=-1)
    step = max(keys.integer("moe_layer_interval", default=1), 1)
    sparse = range(first, count if last == -1 else last + 1)
    return ModelConfig(
        family="ernie4_5_moe",
        attention=attention,
        rope=keys.rope(attention.head_size, context=context, interleaved=True, theta=500_000.0),
        layers=tuple(
            Layer(experts if number in sparse and (number + 1) % step == 0 else dense) for number in range(count)
        ),
        **keys.every(context, eps=1e-5) | {"tied": keys.flag("tie_word_embeddings", default=True)},
    )


def write(config: ModelConfig) -> dict[str, Any]:
    attention = config.attention
    sparse = [number for number, layer in enumerate(config.layers) if isinstance(layer.ffn, Experts)]
    dense = next((layer.ffn for layer in config.layers if isinstance(layer.ffn, Dense)), None)
    if not isinstance(attention, GroupedQuery) or not sparse:
        return {}
    experts = config.layers[sparse[0]].ffn
    assert isinstance(experts, Experts)
    return {
        **write_grouped_query(config, attention),
        "intermediate_size": dense.hidden if dense else experts.hidden,
        "use_bias": False,
        "moe_num_experts": experts.count,
        "moe_k": experts.per_token,
        "moe_intermediate_size": experts.hidden,
        "moe_num_shared_experts": experts.shared_hidden // experts.hidden,
        "moe_layer_start_index": sparse[0],
        "moe_layer_end_index": sparse[-1],
        "moe_layer_interval": gcd(*(number + 1 for number in sparse)),
    }


def layouts(config: ModelConfig) -> list[list[Place]]:
    released = Names(correction=RELEASED, correction_row=True)
    fused = Names(fused_experts=True, correction=f"gate.{RELEASED}", correction_row=True)
    return [places(config, released), places(config, fused)]


def unused(config: ModelConfig) -> tuple[str, ...]:
    """Of its layers for further tokens, which are built in another way than all others."""
    return ("model.mtp_",)
