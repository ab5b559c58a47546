"""The config keys of multi-head latent attention and of its indexer, which DeepSeek-V3 and GLM-5 share."""

from __future__ import annotations

from typing import Any

from moesaic.model.config import Indexer, Latent
from moesaic.model.families.keys import Keys
from moesaic.model.families.traits import GGUFReader


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


def read_indexer(keys: Keys, *, heads: int, interleaved: bool) -> Indexer:
    """`heads` are the family's own, for files that leave them out."""
    return Indexer(
        heads=keys.integer("index_n_heads", default=heads),
        head_size=keys.integer("index_head_dim", default=128),
        topk=keys.integer("index_topk", default=2048),
        interleaved=interleaved,
    )


def write_indexer(indexer: Indexer) -> dict[str, Any]:
    return {
        "index_n_heads": indexer.heads,
        "index_head_dim": indexer.head_size,
        "index_topk": indexer.topk,
    }


def gguf_latent(reader: GGUFReader) -> dict[str, Any]:
    rank, rotary = reader.integer("attention.kv_lora_rank"), reader.integer("rope.dimension_count")
    # Newer files describe the heads of the compressed cache under the old keys, and the real heads under these.
    key = reader.integer("attention.key_length_mla", 0) or reader.integer("attention.key_length")
    value = reader.integer("attention.value_length_mla", 0) or reader.integer("attention.value_length")
    if key <= rotary:
        raise reader.impossible(f"keys of size {key} with {rotary} of it rotated")
    query_rank = reader.integer("attention.q_lora_rank", 0) or None
    reader.sizes |= {
        "C": key,
        "Q": query_rank or 0,
        "R": rank,
        "J": rank + rotary,
        "X": value,
        "K": key - rotary + value,
    }
    return {
        "q_lora_rank": query_rank,
        "kv_lora_rank": rank,
        "qk_rope_head_dim": rotary,
        "qk_nope_head_dim": key - rotary,
        "v_head_dim": value,
        "rope_interleave": True,
    }
