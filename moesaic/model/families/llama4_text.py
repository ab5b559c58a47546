"""Llama 4's language model: attention by chunks, some layers without positions; one expert, whose input is scaled."""

from __future__ import annotations

from typing import Any

from moesaic.model.config import Dense, Experts, GroupedQuery, Layer, ModelConfig, Temperature
from moesaic.model.families.keys import Keys, write_grouped_query
from moesaic.model.families.places import Names, Place, places
from moesaic.model.families.traits import Traits, Turned

ARCHITECTURE = "Llama4ForCausalLM"
TRAITS = Traits(interleaved=True, norm="unit", scales_input=True)
TURNED = {"feed_forward.experts.gate_up_proj": Turned(), "feed_forward.experts.down_proj": Turned()}
NEAR, FAR = "chunked_attention", "full_attention"
CHUNK, FLOOR, SCALE = 8192, 8192, 0.1


def read(keys: Keys) -> ModelConfig:
    bias = keys.flag("attention_bias", default=False)
    unit = keys.flag("use_qk_norm", default=True)
    attention = keys.grouped_query(
        kv_heads=8, head_size=128, qkv_bias=bias, out_bias=bias, qk_norm=unit, norm="unit" if unit else "heads"
    )
    context, width = keys.integer("max_position_embeddings", default=131072), keys.integer("intermediate_size")
    experts = Experts(
        count=keys.integer("num_local_experts", "num_experts", default=16),
        per_token=keys.integer("num_experts_per_tok", default=1),
        hidden=width,
        score="sigmoid",
        normalize=False,
        shared_hidden=width,
        scales_input=True,
    )
    dense, count = Dense(keys.integer("intermediate_size_mlp", default=16384)), keys.layer_count()
    step = max(keys.integer("interleave_moe_layer_step", default=1), 1)
    given = keys.raw.get("moe_layers") is not None
    sparse = keys.tokens("moe_layers") if given else tuple(range(step - 1, count, step))
    every = max(keys.integer("no_rope_layer_interval", default=4), 1)
    turns = keys.tokens("no_rope_layers") or tuple(int((n + 1) % every != 0) for n in range(count))
    if len(turns) < count:
        raise keys.wrong("no_rope_layers", "a 0 or 1 for each layer", keys.raw["no_rope_layers"])
    kinds = keys.choices("layer_types", {NEAR, FAR}, count) or [NEAR if turn else FAR for turn in turns]
    chunk = keys.maybe_integer("attention_chunk_size", default=CHUNK)
    tuned = keys.flag("attn_temperature_tuning", default=True)
    warmer = Temperature(keys.integer("floor_scale", default=FLOOR), keys.number("attn_scale", default=SCALE))
    return ModelConfig(
        family="llama4_text",
        attention=attention,
        rope=keys.rope(attention.head_size, context=context, interleaved=True, theta=500_000.0),
        layers=tuple(
            Layer(
                experts if number in sparse else dense,
                window=chunk if kinds[number] == NEAR else None,
                chunked=kinds[number] == NEAR and chunk is not None,
                positions=bool(turns[number]),
                temperature=warmer if tuned and not turns[number] else None,
            )
            for number in range(count)
        ),
        **keys.every(context, eps=1e-5),
    )


def write(config: ModelConfig) -> dict[str, Any]:
    attention = config.attention
    sparse = [number for number, layer in enumerate(config.layers) if isinstance(layer.ffn, Experts)]
    dense = next((layer.ffn for layer in config.layers if isinstance(layer.ffn, Dense)), None)
    if not isinstance(attention, GroupedQuery) or not sparse:
        return {}
    experts = config.layers[sparse[0]].ffn
    assert isinstance(experts, Experts)
    warmer = next((layer.temperature for layer in config.layers if layer.temperature), None)
    return {
        **write_grouped_query(config, attention),
        "attention_bias": attention.qkv_bias,
        "use_qk_norm": attention.qk_norm,
        "intermediate_size": experts.hidden,
        "intermediate_size_mlp": dense.hidden if dense else 2 * experts.hidden,
        "num_local_experts": experts.count,
        "num_experts_per_tok": experts.per_token,
        "moe_layers": sparse,
        "no_rope_layers": [int(layer.positions) for layer in config.layers],
        "layer_types": [NEAR if layer.chunked else FAR for layer in config.layers],
        "attention_chunk_size": next((layer.window for layer in config.layers if layer.chunked), CHUNK),
        "attn_temperature_tuning": warmer is not None,
        "floor_scale": warmer.floor if warmer else FLOOR,
        "attn_scale": warmer.scale if warmer else SCALE,
    }


def layouts(config: ModelConfig) -> list[list[Place]]:
    mixture = "feed_forward"
    return [places(config, Names(mixture, mixture, router="router", shared="shared_expert", fused_experts=True))]
