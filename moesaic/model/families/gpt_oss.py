"""gpt-oss: heads with learned sinks, windows in every other layer, biases everywhere, experts with a clamped gate."""

from __future__ import annotations

from typing import Any

from moesaic.model.config import Experts, GroupedQuery, Layer, ModelConfig
from moesaic.model.families.keys import Keys, write_grouped_query
from moesaic.model.families.places import Names, Place, places
from moesaic.model.families.traits import Traits, Turned

ARCHITECTURE = "GptOssForCausalLM"
TRAITS = Traits(sinks=True, bias=True, activation="clamped_swiglu")
TURNED = {
    "mlp.experts.gate_up_proj": Turned(alternating=True),
    "mlp.experts.gate_up_proj_bias": Turned(inputs_first=False, alternating=True),
    "mlp.experts.down_proj": Turned(),
}
# The bounds and the slope of the gate, which kernels have as numbers of their own.
LIMIT, SLOPE = 7.0, 1.702
WINDOW = 128  # where no layer has one, too: `transformers` asks for it
NEAR, FAR = "sliding_attention", "full_attention"


def read(keys: Keys) -> ModelConfig:
    for name, value in (("swiglu_limit", LIMIT), ("swiglu_alpha", SLOPE)):
        if keys.number(name, default=value) != value:
            raise keys.wrong(name, f"{value:g}", keys.raw[name])
    bias = keys.flag("attention_bias", default=True)
    attention = keys.grouped_query(kv_heads=8, head_size=64, qkv_bias=bias, out_bias=bias, sinks=True)
    context = keys.integer("max_position_embeddings", default=131072)
    experts = Experts(
        count=keys.integer("num_local_experts", "num_experts", default=128),
        per_token=keys.integer("num_experts_per_tok", "experts_per_token", default=4),
        hidden=keys.integer("intermediate_size", default=2880),
        bias=True,
    )
    count, window = keys.layer_count(), keys.integer("sliding_window", default=WINDOW)
    kinds = keys.choices("layer_types", {NEAR, FAR}, count) or [FAR if n % 2 else NEAR for n in range(count)]
    return ModelConfig(
        family="gpt_oss",
        attention=attention,
        rope=keys.rope(attention.head_size, context=context, theta=150_000.0),
        layers=tuple(Layer(experts, window if kind == NEAR else None) for kind in kinds[:count]),
        **keys.every(context, eps=1e-5) | {"activation": "clamped_swiglu"},
    )


def write(config: ModelConfig) -> dict[str, Any]:
    attention, experts = config.attention, config.layers[0].ffn
    if not isinstance(attention, GroupedQuery) or not isinstance(experts, Experts):
        return {}
    windows = [layer.window for layer in config.layers]
    return {
        **write_grouped_query(config, attention),
        "hidden_act": "silu",
        "attention_bias": attention.qkv_bias,
        "intermediate_size": experts.hidden,
        "num_local_experts": experts.count,
        "num_experts_per_tok": experts.per_token,
        "sliding_window": next((window for window in windows if window), WINDOW),
        "layer_types": [NEAR if window else FAR for window in windows],
        "swiglu_limit": LIMIT,
        "swiglu_alpha": SLOPE,
    }


def layouts(config: ModelConfig) -> list[list[Place]]:
    return [places(config, Names(router="router", fused_experts=True))]
