"""Qwen3-MoE: softmax router, no shared expert, dense layers where the configuration says so."""

from __future__ import annotations

from typing import Any

from moesaic.model.config import Dense, Experts, GroupedQuery, Layer, ModelConfig
from moesaic.model.families.keys import Keys, write_grouped_query
from moesaic.model.families.places import Names, Place, places
from moesaic.model.families.traits import GGUF, GGUFReader, Traits, attention_parts, expert_hidden

ARCHITECTURE = "Qwen3MoeForCausalLM"
TRAITS = Traits()


def read(keys: Keys) -> ModelConfig:
    bias = keys.flag("attention_bias", default=False)
    attention = keys.grouped_query(kv_heads=4, qkv_bias=bias, out_bias=bias, qk_norm=True)
    context = keys.integer("max_position_embeddings", default=32768)
    window = keys.maybe_integer("sliding_window") if keys.flag("use_sliding_window", default=False) else None
    experts = Experts(
        count=keys.integer("num_experts", "num_local_experts", default=128),
        per_token=keys.integer("num_experts_per_tok", default=8),
        hidden=keys.integer("moe_intermediate_size", default=768),
        normalize=keys.flag("norm_topk_prob", default=False),
    )
    dense = Dense(keys.integer("intermediate_size", default=6144))
    always_dense, step = keys.tokens("mlp_only_layers"), max(keys.integer("decoder_sparse_step", default=1), 1)
    return ModelConfig(
        family="qwen3_moe",
        attention=attention,
        rope=keys.rope(attention.head_size, context=context),
        layers=tuple(
            Layer(dense if number in always_dense or (number + 1) % step else experts, window)
            for number in range(keys.layer_count())
        ),
        **keys.every(context, eps=1e-6),
    )


def write(config: ModelConfig) -> dict[str, Any]:
    attention = config.attention
    experts = next((layer.ffn for layer in config.layers if isinstance(layer.ffn, Experts)), None)
    dense = [number for number, layer in enumerate(config.layers) if isinstance(layer.ffn, Dense)]
    if not isinstance(attention, GroupedQuery) or experts is None:
        return {}
    window = config.layers[0].window
    return {
        **write_grouped_query(config, attention),
        "intermediate_size": config.layers[dense[0]].ffn.hidden if dense else experts.hidden,
        "attention_bias": attention.qkv_bias,
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "num_experts": experts.count,
        "num_experts_per_tok": experts.per_token,
        "moe_intermediate_size": experts.hidden,
        "norm_topk_prob": experts.normalize,
        "mlp_only_layers": dense,
        "decoder_sparse_step": 1,
    }


def layouts(config: ModelConfig) -> list[list[Place]]:
    return [places(config, Names()), places(config, Names(fused_experts=True))]


def gguf_parts(config: dict[str, Any], layer: int) -> list[str]:
    return ["norms", *attention_parts(config), "qk_norm", "experts"]


def gguf_config(reader: GGUFReader) -> dict[str, Any]:
    # llama.cpp renormalises the top k of this architecture unasked.
    routing = {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
    return {"num_experts": reader.sizes["E"], **expert_hidden(reader), **routing}


GGUF_NAMES = GGUF("qwen3moe", gguf_parts, gguf_config, mixture=True)
