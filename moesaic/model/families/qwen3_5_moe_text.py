"""The language model of Qwen3.5's mixtures: Qwen3-Next with projections that lie apart on disk, and no dense layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from moesaic.model.config import DeltaRule, ModelConfig
from moesaic.model.families import qwen3_next
from moesaic.model.families.keys import Keys
from moesaic.model.families.places import Names, Place, places
from moesaic.model.families.traits import Turned

ARCHITECTURE = "Qwen3_5MoeForCausalLM"
TRAITS = qwen3_next.TRAITS
unused = qwen3_next.unused
FIXED = {"norm_topk_prob": True, "mlp_only_layers": [], "decoder_sparse_step": 1}
DEFAULTS = {"num_experts": 256, "num_experts_per_tok": 8}


def read(keys: Keys) -> ModelConfig:
    config = qwen3_next.read(Keys(DEFAULTS | keys.raw | FIXED, keys.place))
    return replace(config, family="qwen3_5_moe_text")


def write(config: ModelConfig) -> dict[str, Any]:
    found = qwen3_next.write(config)
    return {key: value for key, value in found.items() if key not in (*FIXED, "intermediate_size")}


def layouts(config: ModelConfig) -> list[list[Place]]:
    return [places(config, Names(shared="shared_expert", fused_experts=fused, delta=delta)) for fused in (True, False)]


def delta(hidden: int, shape: DeltaRule, there: str, here: str) -> Iterator[Place]:
    keys, values = shape.key_heads * shape.key_size, shape.heads * shape.value_size
    for place in qwen3_next.delta_places(hidden, shape, there, here):
        parts: dict[str, int] = {}
        if place.name.endswith("in_proj_qkvz.weight"):
            parts = {"in_proj_qkv": 2 * keys + values, "in_proj_z": values}
        elif place.name.endswith("in_proj_ba.weight"):
            parts = {"in_proj_b": shape.heads, "in_proj_a": shape.heads}
        start, above = 0, place.name.rpartition(".in_proj")[0]
        for name, rows in parts.items():
            yield Place(f"{above}.{name}.weight", (rows, hidden), place.parameter, (slice(start, start + rows),))
            start += rows
        if not parts:
            yield place


def turned(raw: dict[str, Any]) -> dict[str, Turned]:
    """Attention alone has queries and gates head by head."""
    return {name: one for name, one in qwen3_next.turned(raw).items() if name.startswith("self_attn.")}
