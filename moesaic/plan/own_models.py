"""Model directories whose layers differ in what few dimensions cannot say: as the product itself reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moesaic.model.config import Experts, Latent, Layer, ModelConfig
from moesaic.model.families import read_config
from moesaic.plan.shape import AttentionShape, FfnShape, LatentShape, LayerShape, ModelShape


def from_own_config(raw: dict[str, Any], file: Path) -> ModelShape:
    return from_config(read_config(raw, file), file.parent.name)


def from_config(config: ModelConfig, name: str) -> ModelShape:
    layers = tuple(_layer(config, given) for given in config.layers)
    further = tuple(_layer(config, given) for given in config.mtp)
    return ModelShape(name, config.hidden, config.vocab, layers, config.tied, 0, further)


def _layer(config: ModelConfig, layer: Layer) -> LayerShape:
    own, ffn, delta = config.attention, layer.ffn, layer.delta
    if delta is not None:  # what is predicted from a state, what corrects it and what is read, in keys' worth
        sizes, worth = (delta.key_size, delta.value_size), 3 * delta.key_size * delta.value_size
        state = delta.heads * delta.key_size * delta.value_size
        attention = AttentionShape(delta.heads, delta.key_heads, *sizes, max(worth // sum(sizes), 1), state=state)
    elif isinstance(own, Latent):
        low = LatentShape(own.q_rank, own.kv_rank, own.rope_size)
        index = own.indexer
        extra = (index.topk, index.heads, index.head_size) if index else (None, 0, 0)
        attention = AttentionShape(own.heads, own.heads, own.key_size, own.value_size, layer.window, low, *extra)
    else:
        sizes = own.head_size, own.head_size
        attention = AttentionShape(own.heads, own.kv_heads, *sizes, layer.window, gated=own.gated)
    if not isinstance(ffn, Experts):
        return LayerShape(attention, FfnShape(ffn.hidden))
    return LayerShape(attention, FfnShape(ffn.hidden, True, ffn.count, ffn.per_token, ffn.shared_hidden, ffn.bias))
