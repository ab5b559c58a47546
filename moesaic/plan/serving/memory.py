"""Bytes one rank holds while serving: weights, KV cache, buffers; and how many sequences fit beside the weights."""

from __future__ import annotations

import math

from moesaic.plan.hardware import FORMAT_BYTES
from moesaic.plan.serving.step import BF16, Serving

CHUNK = 8192  # tokens of the largest step
RUNTIME = 1.5e9  # CUDA context, communication buffers, CUDA graphs


def weight_bytes(serving: Serving) -> float:
    """Attention is divided by tp, experts over all ranks; the largest pipeline stage counts."""
    model, layout = serving.model, serving.layout
    dense, few = FORMAT_BYTES[serving.dense_dtype], FORMAT_BYTES[serving.dtype]
    ranks = layout.tp * layout.dp
    total = 0.0
    for layer, count in model.kinds().items():
        plain = layer.attention.parameters(model.hidden) + layer.ffn.other_parameters(model.hidden)
        copies = ranks / layout.ep if layout.ep > ranks else 1
        experts = layer.ffn.expert_parameters(model.hidden) / ranks * copies
        total += count * (plain / layout.tp * dense + experts * few + 2 * model.hidden * BF16)
    per_stage = total / len(model.layers) * math.ceil(len(model.layers) / layout.pp)
    tables = model.embedding_parameters * BF16 / layout.tp
    return per_stage + tables * (1 if model.tied or layout.pp > 1 else 2)


def sequence_bytes(serving: Serving, tokens: float) -> float:
    """KV cache of one sequence of `tokens` on one rank. A latent is not divided: every rank of tp holds it whole."""
    model, layout = serving.model, serving.layout
    size = FORMAT_BYTES[serving.cache_dtype]
    total = 0.0
    for layer, count in model.kinds().items():
        shape = layer.attention
        heads = 1.0 if shape.latent else max(1.0, shape.kv_heads / layout.tp) / shape.kv_heads
        total += count * min(tokens, shape.window or tokens) * shape.cache_width() * heads * size
        total += count * shape.state / layout.tp * 4
    return total / layout.pp / layout.cp


def buffer_bytes(serving: Serving, tokens: float) -> float:
    """Activations of the largest step, logits of its sequences, and what the runtime keeps."""
    model, layout = serving.model, serving.layout
    rows = min(tokens, CHUNK)
    widest = max(max(layer.ffn.hidden * max(1, layer.ffn.topk) / layout.tp, 1) for layer in model.kinds())
    return RUNTIME + rows * (6 * model.hidden + 2 * widest) * BF16


def sequences_that_fit(serving: Serving, tokens: float) -> int:
    """In one replica of the attention."""
    room = serving.device.memory_bytes * serving.engine.memory_share - weight_bytes(serving)
    room -= buffer_bytes(serving, CHUNK)
    return max(0, int(room / max(1.0, sequence_bytes(serving, tokens))))
