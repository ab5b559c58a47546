"""Mixtral: softmax router with normalised weights, every layer a mixture, experts of w1 (gate), w3 (up), w2 (down)."""

from __future__ import annotations

from typing import Any

from moesaic.model.config import Experts, GroupedQuery, Layer, ModelConfig
from moesaic.model.families.keys import Keys, write_grouped_query
from moesaic.model.families.places import Names, Place, places
from moesaic.model.families.traits import GGUF, GGUFReader, Traits

ARCHITECTURE = "MixtralForCausalLM"
TRAITS = Traits()


def read(keys: Keys) -> ModelConfig:
    attention = keys.grouped_query()
    context = keys.integer("max_position_embeddings", default=131072)
    experts = Experts(
        count=keys.integer("num_local_experts", "num_experts", default=8),
        per_token=keys.integer("num_experts_per_tok", default=2),
        hidden=keys.integer("intermediate_size"),
    )
    return ModelConfig(
        family="mixtral",
        attention=attention,
        rope=keys.rope(attention.head_size, context=context, theta=1e6),
        layers=(Layer(experts, keys.maybe_integer("sliding_window")),) * keys.layer_count(),
        **keys.every(context, eps=1e-5),
    )


def write(config: ModelConfig) -> dict[str, Any]:
    attention, experts = config.attention, config.layers[0].ffn
    if not isinstance(attention, GroupedQuery) or not isinstance(experts, Experts):
        return {}
    return {
        **write_grouped_query(config, attention),
        "intermediate_size": experts.hidden,
        "sliding_window": config.layers[0].window,
        "num_local_experts": experts.count,
        "num_experts_per_tok": experts.per_token,
    }


def layouts(config: ModelConfig) -> list[list[Place]]:
    return [
        places(config, Names(mixture="block_sparse_moe", gate="w1", up="w3", down="w2")),
        places(config, Names(mixture="mlp", fused_experts=True)),
        places(config, Names(mixture="block_sparse_moe", fused_experts=True)),
    ]


def gguf_parts(config: dict[str, Any], layer: int) -> list[str]:
    return ["norms", "attention", "own"]


def gguf_config(reader: GGUFReader) -> dict[str, Any]:
    return {"num_local_experts": reader.sizes["E"], "sliding_window": None}


GGUF_TABLE = """
ffn_gate_inp.weight   block_sparse_moe.gate.weight            E,D
ffn_gate_exps.weight  block_sparse_moe.experts.{e}.w1.weight  E,I,D
ffn_up_exps.weight    block_sparse_moe.experts.{e}.w3.weight  E,I,D
ffn_down_exps.weight  block_sparse_moe.experts.{e}.w2.weight  E,D,I
"""
GGUF_NAMES = GGUF("llama", gguf_parts, gguf_config, GGUF_TABLE, mixture=True, rotates_neighbours=True)
