"""FLOPs of a model, counted from its shape and not measured (AIPerf, Ren et al.): the one place that counts them.

    forward_flops(config, [Chunk(new=512)])                       # a prompt
    forward_flops(config, [Chunk(new=1, cached=511)] * 16)        # one token more of sixteen
    training_flops(config, [256] * 8)                             # a training step: backward is twice forward

Counted are the matmuls that the model's definition asks for, a multiplication and an addition as two. Not counted is
what an implementation does besides: pairs of tokens that do not see each other, what is computed again in the backward
pass, experts that stand idle, norms and activations, the optimizer. The planner, which knows models by their sizes
alone, adds up the same parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch

from moesaic.model.config import Experts, GroupedQuery, Layer, ModelConfig
from moesaic.model.transformer import Model

TRAINING = 3  # times the forward pass: gradients of inputs and of weights are as many matmuls again, each


@dataclass(frozen=True)
class Chunk:
    """Tokens of one sequence that are computed, after others that were before."""

    new: int
    cached: int = 0

    def pairs(self, limit: int | None = None) -> int:
        """Of a token and one that it sees, itself included; at most `limit` each."""
        last = self.cached + self.new
        full = self.new if limit is None else max(0, min(self.new, limit - self.cached))  # tokens that see all before
        seen = full * self.cached + full * (full + 1) // 2
        return seen + (self.new - full) * min(limit or 0, last)


def matmul_flops(weights: float, tokens: float) -> float:
    return 2 * weights * tokens


def attention_flops(heads: float, key_size: float, value_size: float, pairs: float) -> float:
    """A score and a weighted sum for each pair and head."""
    return 2 * heads * (key_size + value_size) * pairs


def forward_flops(
    config: ModelConfig, chunks: Sequence[Chunk], logits: int | None = None, predictions: bool = False
) -> int:
    """`logits` is for how many tokens logits are computed, by default all; `predictions`: with the layers that predict
    further tokens, as in training."""
    tokens = sum(chunk.new for chunk in chunks)
    body, further = _weights(config)
    output = 0 if config.encoder is not None else config.vocab * config.hidden
    total = matmul_flops(body, tokens) + matmul_flops(output, tokens if logits is None else logits)
    layers = config.layers
    if predictions and config.mtp:
        total += matmul_flops(further + len(config.mtp) * output, tokens)
        layers += config.mtp
    return int(total + sum(_attention(config, layer, chunks) for layer in layers))


def training_flops(config: ModelConfig, lengths: Sequence[int]) -> int:
    """Of training on sequences of these lengths, once each."""
    return TRAINING * forward_flops(config, [Chunk(length) for length in lengths], predictions=True)


def _attention(config: ModelConfig, layer: Layer, chunks: Sequence[Chunk]) -> float:
    shape, limit = config.attention, layer.window
    if (delta := layer.delta) is not None:  # what a state predicts, what is written to it, and what is read
        return 3 * matmul_flops(delta.heads * delta.key_size * delta.value_size, sum(chunk.new for chunk in chunks))
    if isinstance(shape, GroupedQuery):
        key_size = value_size = shape.head_size
    else:
        key_size, value_size = shape.key_size, shape.value_size
        limit = shape.indexer.topk if layer.index and shape.indexer else limit
    return attention_flops(shape.heads, key_size, value_size, sum(chunk.pairs(limit) for chunk in chunks))


@cache
def _weights(config: ModelConfig) -> tuple[int, int]:
    """Of matrices that a token is multiplied with, the output matrix left out; and of layers that predict further."""
    with torch.device("meta"):  # the whole model, without its weights
        model = Model(config)
    body, further = (
        sum(
            parameter.numel()
            for name, parameter in part.named_parameters()
            if parameter.dim() > 1 and "bias" not in name
        )
        for part in (model, model.mtp)
    )
    tables = config.vocab * config.hidden * (1 if config.tied or config.encoder is not None else 2)
    if config.encoder is not None:
        tables += config.encoder.positions * config.hidden
    idle, further_idle = (
        sum(_idle(layer, config.hidden) for layer in layers) for layers in (config.layers, config.mtp)
    )
    return body - further - idle - tables, further - further_idle


def _idle(layer: Layer, hidden: int) -> int:
    ffn = layer.ffn
    return (ffn.count - ffn.per_token) * 3 * ffn.hidden * hidden if isinstance(ffn, Experts) else 0
