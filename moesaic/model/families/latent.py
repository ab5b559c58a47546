"""The config keys of multi-head latent attention, which DeepSeek-V3 and GLM-5 share."""

from __future__ import annotations

from typing import Any

from moesaic.model.config import Latent
from moesaic.model.families.keys import Keys


def read_latent(keys: Keys) -> Latent:
    return Latent(
        heads=keys.integer("num_attention_heads"),
        kv_rank=keys.integer("kv_lora_rank"),
        plain_size=keys.integer("qk_nope_head_dim"),
        rope_size=keys.integer("qk_rope_head_dim"),
        value_size=keys.integer("v_head_dim"),
        q_rank=keys.maybe_integer("q_lora_rank"),
        bias=keys.flag("attention_bias", default=False),
    )


def write_latent(attention: Latent) -> dict[str, Any]:
    return {
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.heads,
        "kv_lora_rank": attention.kv_rank,
        "q_lora_rank": attention.q_rank,
        "qk_nope_head_dim": attention.plain_size,
        "qk_rope_head_dim": attention.rope_size,
        "v_head_dim": attention.value_size,
        "attention_bias": attention.bias,
    }
