"""FLOPs of a forward pass, counted from the model's shape and not measured (AIPerf, Ren et al.).

    forward_flops(config, [Chunk(new=512)])                       # a prompt
    forward_flops(config, [Chunk(new=1, cached=511)] * 16)        # one token more of sixteen
    3 * forward_flops(config, [Chunk(256)] * 8)                   # a training step: backward is twice forward

Counted are the matmuls that the model's definition asks for, a multiplication and an addition as two. Not
counted is what an implementation does besides: pairs of tokens that do not see each other, what is computed again in
the backward pass, norms and activations, the optimizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moesaic.model.config import Experts, GroupedQuery, Layer, ModelConfig


@dataclass(frozen=True)
class Chunk:
    """Tokens of one sequence that are computed, after others that were before."""

    new: int
    cached: int = 0

    def pairs(self, window: int | None) -> int:
        """Of a token and one that it sees, itself included."""
        if window is None:
            return self.new * self.cached + self.new * (self.new + 1) // 2
        return sum(min(window, self.cached + place) for place in range(1, self.new + 1))


def forward_flops(config: ModelConfig, chunks: Sequence[Chunk], logits: int | None = None) -> int:
    """`logits` is for how many tokens logits are computed; by default all."""
    tokens = sum(chunk.new for chunk in chunks)
    rows = tokens if logits is None else logits
    total = 2 * rows * config.vocab * config.hidden
    for layer in config.layers:
        total += tokens * _per_token(config, layer)
        total += _attention(config, sum(chunk.pairs(layer.window) for chunk in chunks))
    return total


def _attention(config: ModelConfig, pairs: int) -> int:
    """A score and a weighted sum for each pair and head."""
    assert isinstance(config.attention, GroupedQuery), "the workload's model has grouped queries"
    return 4 * config.attention.heads * config.attention.head_size * pairs


def _per_token(config: ModelConfig, layer: Layer) -> int:
    shape, hidden, ffn = config.attention, config.hidden, layer.ffn
    assert isinstance(shape, GroupedQuery)
    matrices = hidden * shape.head_size * (2 * shape.heads + 2 * shape.kv_heads)  # queries, keys, values, and out
    if isinstance(ffn, Experts):
        matrices += hidden * ffn.count  # the router
        matrices += 3 * hidden * (ffn.per_token * ffn.hidden + ffn.shared_hidden)
        matrices += 2 * hidden if ffn.residual else 0
    else:
        matrices += 3 * hidden * ffn.hidden
    return 2 * matrices
