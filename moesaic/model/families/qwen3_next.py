"""Qwen3-Next: a gated delta rule in three layers of four, gated attention in the fourth; experts, and a shared one of
which a token takes a learned share; norms that count from one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from moesaic.model.config import DeltaRule, Dense, Experts, GroupedQuery, Layer, ModelConfig
from moesaic.model.families.keys import Keys, write_grouped_query
from moesaic.model.families.places import Names, Place, places
from moesaic.model.families.traits import Traits, Turned

ARCHITECTURE = "Qwen3NextForCausalLM"
TRAITS = Traits(rotary_share=0.25, gated=True, norm_offset=True, shared_gate=True, delta=True)
UNSEEN = DeltaRule(16, 32, 128, 128)  # where no layer has one
LINEAR, FULL = "linear_attention", "full_attention"


def read(keys: Keys) -> ModelConfig:
    bias = keys.flag("attention_bias", default=False)
    attention = keys.grouped_query(kv_heads=2, head_size=256, qkv_bias=bias, out_bias=bias, qk_norm=True, gated=True)
    context = keys.integer("max_position_embeddings", default=32768)
    experts = Experts(
        count=keys.integer("num_experts", "num_local_experts", default=512),
        per_token=keys.integer("num_experts_per_tok", default=10),
        hidden=keys.integer("moe_intermediate_size", default=512),
        normalize=keys.flag("norm_topk_prob", default=True),
        shared_hidden=keys.integer("shared_expert_intermediate_size", default=512),
        shared_gate=True,
    )
    dense, count = Dense(keys.integer("intermediate_size", default=5632)), keys.layer_count()
    always_dense, step = keys.tokens("mlp_only_layers"), max(keys.integer("decoder_sparse_step", default=1), 1)
    every = max(keys.integer("full_attention_interval", default=4), 1)
    kinds = keys.choices("layer_types", {LINEAR, FULL}, count)
    kinds = kinds or [LINEAR if (number + 1) % every else FULL for number in range(count)]
    delta = read_delta_rule(keys)
    return ModelConfig(
        family="qwen3_next",
        attention=attention,
        rope=keys.rope(attention.head_size, context=context, share=0.25),
        layers=tuple(
            Layer(
                dense if number in always_dense or (number + 1) % step else experts,
                delta=delta if kinds[number] == LINEAR else None,
            )
            for number in range(count)
        ),
        norm_offset=True,
        **keys.every(context, eps=1e-6),
    )


def read_delta_rule(keys: Keys) -> DeltaRule:
    return DeltaRule(
        key_heads=keys.integer("linear_num_key_heads", default=16),
        heads=keys.integer("linear_num_value_heads", default=32),
        key_size=keys.integer("linear_key_head_dim", default=128),
        value_size=keys.integer("linear_value_head_dim", default=128),
        width=keys.integer("linear_conv_kernel_dim", default=4),
    )


def write(config: ModelConfig) -> dict[str, Any]:
    attention = config.attention
    experts = next((layer.ffn for layer in config.layers if isinstance(layer.ffn, Experts)), None)
    dense = [number for number, layer in enumerate(config.layers) if isinstance(layer.ffn, Dense)]
    delta = next((layer.delta for layer in config.layers if layer.delta is not None), UNSEEN)
    if not isinstance(attention, GroupedQuery) or experts is None:
        return {}
    return {
        **write_grouped_query(config, attention, partial=True),
        "intermediate_size": config.layers[dense[0]].ffn.hidden if dense else experts.hidden,
        "attention_bias": attention.qkv_bias,
        "layer_types": [LINEAR if layer.delta is not None else FULL for layer in config.layers],
        "linear_num_key_heads": delta.key_heads,
        "linear_num_value_heads": delta.heads,
        "linear_key_head_dim": delta.key_size,
        "linear_value_head_dim": delta.value_size,
        "linear_conv_kernel_dim": delta.width,
        "num_experts": experts.count,
        "num_experts_per_tok": experts.per_token,
        "moe_intermediate_size": experts.hidden,
        "shared_expert_intermediate_size": experts.shared_hidden,
        "norm_topk_prob": experts.normalize,
        "mlp_only_layers": dense,
        "decoder_sparse_step": 1,
    }


def layouts(config: ModelConfig) -> list[list[Place]]:
    names = Names(shared="shared_expert", delta=delta_places)
    return [
        places(config, names),
        places(config, Names(shared="shared_expert", fused_experts=True, delta=delta_places)),
    ]


def delta_places(hidden: int, shape: DeltaRule, there: str, here: str) -> Iterator[Place]:
    keys, values = shape.key_heads * shape.key_size, shape.heads * shape.value_size
    mixed, there = 2 * keys + values, f"{there}.linear_attn"
    yield Place(f"{there}.in_proj_qkvz.weight", (mixed + values, hidden), f"{here}.qkvz.weight")
    yield Place(f"{there}.in_proj_ba.weight", (2 * shape.heads, hidden), f"{here}.strength_decay.weight")
    # A dimension that the file has in addition.
    yield Place(f"{there}.conv1d.weight", (mixed, 1, shape.width), f"{here}.taps_XW", (slice(0, mixed), None))
    yield Place(f"{there}.A_log", (shape.heads,), f"{here}.log_rate")
    yield Place(f"{there}.dt_bias", (shape.heads,), f"{here}.shift")
    yield Place(f"{there}.norm.weight", (shape.value_size,), f"{here}.norm.weight")
    yield Place(f"{there}.out_proj.weight", (hidden, values), f"{here}.out.weight")


def turned(raw: dict[str, Any]) -> dict[str, Turned]:
    """Rows lie head by head: a key head's query, key, values and gates; a query head's query and gate."""
    delta, head_size = read_delta_rule(Keys(raw, "config.json")), int(raw.get("head_dim") or 256)
    shared = delta.heads // delta.key_heads
    values = shared * delta.value_size
    queries = Turned(inputs_first=False, by_head=(head_size, head_size))
    return {
        "linear_attn.in_proj_qkvz.weight": Turned(False, by_head=(delta.key_size, delta.key_size, values, values)),
        "linear_attn.in_proj_ba.weight": Turned(False, by_head=(shared, shared)),
        "self_attn.q_proj.weight": queries,
        "self_attn.q_proj.bias": queries,
    }


def unused(config: ModelConfig) -> tuple[str, ...]:
    """Layers that predict further tokens, which `transformers` leaves out, too."""
    return ("mtp.",)
