"""A model as the planner sees it: sizes only. From a catalogue name, a model directory, or a YAML of bare dimensions.

The planner also knows models that the product does not run (GPT-3, Megatron's series), so this is not `ModelConfig`.
Layers that are alike are equal values: what is computed for one holds for all.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from moesaic.model.flops import TRAINING, Chunk, attention_flops, matmul_flops


@dataclass(frozen=True)
class LatentShape:
    """Multi-head latent attention: ranks of queries (None: full) and of keys and values, and the rotary part."""

    q_rank: int | None
    kv_rank: int
    rope: int


@dataclass(frozen=True)
class AttentionShape:
    heads: int
    kv_heads: int
    key_size: int  # per head, as scores are computed
    value_size: int
    window: int | None = None  # keys a token sees at most
    latent: LatentShape | None = None
    topk: int | None = None  # DSA: keys a token attends to after the indexer's choice
    index_heads: int = 0
    index_size: int = 0
    state: int = 0  # linear attention: numbers of recurrent state per sequence, in place of a cache (and `window` keys'
    # worth of flops)
    gated: bool = False  # what heads give is multiplied by a gate of their own

    def parameters(self, hidden: int) -> int:
        out = self.heads * self.value_size * hidden
        if self.state:  # queries and keys, values and their gate
            return 2 * hidden * (self.kv_heads * self.key_size + self.heads * self.value_size) + out
        if self.latent is None:
            out *= 2 if self.gated else 1
            return hidden * (self.heads * self.key_size + self.kv_heads * (self.key_size + self.value_size)) + out
        low = self.latent
        plain = self.key_size - low.rope
        queries = self.heads * self.key_size
        q = hidden * queries if low.q_rank is None else low.q_rank * (hidden + queries)
        kv = hidden * (low.kv_rank + low.rope) + low.kv_rank * self.heads * (plain + self.value_size)
        index = (low.q_rank or hidden) * self.index_heads * self.index_size + hidden * (
            self.index_size + self.index_heads
        )
        return q + kv + out + (index if self.topk else 0)

    def cache_width(self) -> int:
        """Numbers kept per token."""
        if self.state:
            return 0
        if self.latent is None:
            return self.kv_heads * (self.key_size + self.value_size)
        return self.latent.kv_rank + self.latent.rope + (self.index_size if self.topk else 0)


@dataclass(frozen=True)
class FfnShape:
    """A dense feed-forward (`experts` = 0: width `hidden`), or a mixture of `experts` of width `hidden`."""

    hidden: int
    gated: bool = True  # three matrices (SwiGLU) instead of two
    experts: int = 0
    topk: int = 0
    shared_hidden: int = 0  # of shared experts together
    biased: bool = False  # experts with biases and a clamped activation (gpt-oss), for which stacks lack fused kernels

    @property
    def matrices(self) -> int:
        return 3 if self.gated else 2

    def expert_parameters(self, width: int) -> int:
        return self.experts * self.matrices * self.hidden * width

    def other_parameters(self, width: int) -> int:
        """What every token passes through: the dense part, shared experts, the router."""
        if not self.experts:
            return self.matrices * self.hidden * width
        return self.matrices * self.shared_hidden * width + self.experts * width

    def active_parameters(self, width: int) -> int:
        return self.other_parameters(width) + self.topk * self.matrices * self.hidden * width * bool(self.experts)


@dataclass(frozen=True)
class LayerShape:
    attention: AttentionShape
    ffn: FfnShape

    def __hash__(self) -> int:  # a search asks for it a million times
        return hash((self.attention.heads, self.attention.window, self.ffn.hidden, self.ffn.experts))


@dataclass(frozen=True)
class ModelShape:
    name: str
    hidden: int
    vocab: int
    layers: tuple[LayerShape, ...]
    tied: bool = False
    positions: int = 0  # learned position vectors
    mtp: tuple[LayerShape, ...] = ()  # multi-token-prediction layers
    parallel_block: bool = False  # attention and feed-forward read the same rows: half of the tensor-parallel messages

    def __hash__(self) -> int:
        return hash((self.name, self.hidden, self.vocab, len(self.layers)))

    @cached_property
    def _kinds(self) -> Counter[LayerShape]:
        return Counter(self.layers)

    def kinds(self) -> Counter[LayerShape]:
        """Layers that are alike, and how many of each: counted once, a search asks thousands of times."""
        return self._kinds

    @property
    def experts(self) -> int:
        return max(layer.ffn.experts for layer in self.layers)

    @property
    def topk(self) -> int:
        return max(layer.ffn.topk for layer in self.layers)

    @property
    def embedding_parameters(self) -> int:
        return self.hidden * self.vocab

    def layer_parameters(self, layer: LayerShape) -> int:
        norms = 2 * self.hidden
        ffn = layer.ffn
        return (
            layer.attention.parameters(self.hidden)
            + ffn.expert_parameters(self.hidden)
            + ffn.other_parameters(self.hidden)
            + norms
        )

    @property
    def parameters(self) -> int:
        tables = self.embedding_parameters * (1 if self.tied else 2) + self.hidden * (self.positions + 1)
        return tables + sum(self.layer_parameters(kind) * count for kind, count in self.kinds().items())

    @property
    def active_parameters(self) -> int:
        """That one token passes through, the output matrix included and the embedding not."""
        inside = sum(
            count
            * (layer.attention.parameters(self.hidden) + layer.ffn.active_parameters(self.hidden) + 2 * self.hidden)
            for layer, count in self.kinds().items()
        )
        return inside + self.embedding_parameters

    def cache_width(self) -> int:
        """Numbers of KV cache per token, over all layers (a window's bound is not counted here)."""
        return sum(layer.attention.cache_width() * count for layer, count in self.kinds().items())

    def training_flops(self, tokens: float, sequence: int) -> float:
        """Model flops of one step as MFU counts them: 6 per active parameter and token, and attention's two matmuls
        over the causal half (forward once, backward twice). Recomputation is not counted."""
        attention = sum(
            count * attention_flops(own.heads, own.key_size, own.value_size, tokens * attended(own, sequence))
            for own, count in ((layer.attention, count) for layer, count in self.kinds().items())
        )
        return TRAINING * (matmul_flops(self.active_parameters, tokens) + attention)


def attended(attention: AttentionShape, sequence: int) -> float:
    """Keys a token sees on average, causally."""
    return Chunk(sequence).pairs(min(attention.window or sequence, attention.topk or sequence)) / sequence
