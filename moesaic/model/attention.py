"""Attention over a flat batch: grouped-query, and DeepSeek's latent attention with GLM-5's sparse indexer."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from moesaic.kernels.interface import AttentionCall, LatentCall, QKNorm
from moesaic.kernels.layer_weights import GroupedQueryWeights, IndexerWeights, LatentWeights, NormWeights
from moesaic.kernels.token_selection import index_scores
from moesaic.model.config import GroupedQuery, Indexer, Latent, Layer, ModelConfig, Temperature
from moesaic.model.context import ForwardContext
from moesaic.model.delta_rule import GatedDeltaRule
from moesaic.model.indexer_loss import note_indexer_loss
from moesaic.model.linear import Linear, Norm, norm_weights
from moesaic.model.rope import softmax_scale


def make_attention(
    config: ModelConfig, layer: Layer, number: int
) -> GroupedQueryAttention | LatentAttention | GatedDeltaRule:
    """The first half of a layer: attention, or what it has in its place."""
    if layer.delta is not None:
        return GatedDeltaRule(config, layer.delta, number)
    if isinstance(config.attention, GroupedQuery):
        return GroupedQueryAttention(config, config.attention, layer, number)
    return LatentAttention(config, config.attention, layer, number)


class GroupedQueryAttention(nn.Module):
    def __init__(self, config: ModelConfig, attention: GroupedQuery, layer: Layer, number: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = attention.heads, attention.kv_heads, attention.head_size
        self.window, self.number, self.interleaved = layer.window, number, config.rope.interleaved
        self.rope, self.causal = layer.rope, config.encoder is None
        self.turns = layer.positions and config.rope.size > 0
        self.chunked, self.temperature, self.kind = layer.chunked, layer.temperature, attention.norm
        self.scale, self.eps = self.size**-0.5, config.norm_eps
        # Queries, what gates their heads if anything does, keys, values.
        self.gated, self.offset = attention.gated, config.norm_offset
        queries = self.heads * (2 if self.gated else 1)
        self.qkv = Linear(config.hidden, (queries + 2 * self.kv_heads) * self.size, attention.qkv_bias)
        self.out = Linear(self.heads * self.size, config.hidden, attention.out_bias)
        self.sinks = nn.Parameter(torch.empty(self.heads)) if attention.sinks else None
        weighed = attention.qk_norm and self.kind != "unit"
        wide = self.kind == "whole"
        eps, offset = config.norm_eps, config.norm_offset
        self.q_norm = Norm(self.size * (self.heads if wide else 1), eps, offset) if weighed else None
        self.k_norm = Norm(self.size * (self.kv_heads if wide else 1), eps, offset) if weighed else None
        self.unit = attention.qk_norm and not weighed and self.turns

    def cache_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"keys": (self.kv_heads, self.size), "values": (self.kv_heads, self.size)}

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        return {}

    def forward(self, x_TD: Tensor, context: ForwardContext) -> Tensor:
        ops, layout = context.ops, context.layout
        qkv_TX = self.qkv(x_TD, ops)
        norm, gate_TX = None, None
        if self.gated:
            queries, both = self.heads * self.size, 2 * self.kv_heads * self.size
            q_TX, gate_TX, kv_TX = qkv_TX.split([queries, queries, both], dim=1)
            qkv_TX = torch.cat([q_TX, kv_TX], dim=1)
        if self.unit:
            ones_C = qkv_TX.new_ones(self.size)
            norm = QKNorm(ones_C, ones_C, self.eps)
        elif self.q_norm is not None and self.k_norm is not None:
            if self.kind == "heads" and self.offset:
                heads = (self.heads, self.kv_heads, self.kv_heads)
                q_THC, k_TNC, v_TNC = qkv_TX.unflatten(-1, (-1, self.size)).split(heads, dim=1)
                qkv_TX = torch.cat([self.q_norm(q_THC, ops), self.k_norm(k_TNC, ops), v_TNC], dim=1).flatten(1)
            elif self.kind == "heads":
                norm = QKNorm(self.q_norm.weight, self.k_norm.weight, self.eps)
            elif self.kind == "whole":
                heads = (self.heads, self.kv_heads, self.kv_heads)
                q_TX, k_TX, v_TX = qkv_TX.split([count * self.size for count in heads], dim=1)
                qkv_TX = torch.cat([self.q_norm(q_TX, ops), self.k_norm(k_TX, ops), v_TX], dim=1)
        qkv_TXC = qkv_TX.unflatten(-1, (-1, self.size))
        if self.turns:
            q_THC, k_TNC, v_TNC = ops.qk_norm_rope(qkv_TXC, self.kv_heads, norm, context.angles(self.rope))
        else:  # positions are in the embeddings
            q_THC, k_TNC, v_TNC = qkv_TXC.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        cache = context.cache_layer(self.number)
        if self.q_norm is not None and self.k_norm is not None and self.kind == "rotated":
            q_THC, k_TNC = self.q_norm(q_THC, ops), self.k_norm(k_TNC, ops)
        if self.temperature is not None:
            q_THC = q_THC * lengths(self.temperature, layout.positions_T)[:, None, None].to(q_THC.dtype)
        where = layout, cache, self.scale, self.window, self.number
        call = AttentionCall(*where, causal=self.causal, sinks_H=self.sinks, chunked=self.chunked)
        out_TX = ops.attend(q_THC, k_TNC, v_TNC, call).flatten(1)
        if gate_TX is not None:
            out_TX = ops.gated(torch.cat([gate_TX, out_TX], dim=1), "sigmoid")
        return self.out(out_TX, ops)

    def beyond(self) -> str | None:
        """What of it kernels of several operations do not know."""
        if self.gated or self.offset:
            return "heads that are gated or norms that count from one"
        if self.chunked or self.temperature is not None or not self.turns:
            return "attention by chunks or without positions"
        return f"norms of queries and keys ({self.kind})" if self.kind not in ("heads", "whole") else None

    def weights(self) -> GroupedQueryWeights:
        return GroupedQueryWeights(
            self.qkv.weights(),
            self.out.weights(),
            norm_weights(self.q_norm),
            norm_weights(self.k_norm),
            self.heads,
            self.kv_heads,
            self.size,
            self.window,
            self.interleaved,
            self.scale,
            self.kind == "whole",
            self.sinks,
            self.beyond(),
        )


def lengths(temperature: Temperature, positions_T: Tensor) -> Tensor:
    """What queries are multiplied with; of a position the same to the bit in any batch, as a library's logarithm is
    not."""
    steps_T = (positions_T + 1) // temperature.floor
    most = int(steps_T.max()) if len(steps_T) else 0
    table = [1 + temperature.scale * math.log1p(step) for step in range(most + 1)]
    return torch.tensor(table, device=positions_T.device)[steps_T]


class LatentAttention(nn.Module):
    def __init__(self, config: ModelConfig, attention: Latent, layer: Layer, number: int) -> None:
        super().__init__()
        self.shape, self.number, self.interleaved = attention, number, config.rope.interleaved
        self.scale = softmax_scale(config.rope, attention.key_size)
        queries = attention.heads * attention.key_size
        self.q_down = Linear(config.hidden, attention.q_rank, attention.bias) if attention.q_rank else None
        # The latent norms have an epsilon of their own in every published model.
        self.q_norm = Norm(attention.q_rank, 1e-6) if attention.q_rank else None
        self.q_up = Linear(attention.q_rank or config.hidden, queries)
        self.kv_down = Linear(config.hidden, attention.kv_rank + attention.rope_size, attention.bias)
        self.kv_norm = Norm(attention.kv_rank, 1e-6)
        self.kv_up = Linear(attention.kv_rank, attention.heads * (attention.plain_size + attention.value_size))
        self.out = Linear(attention.heads * attention.value_size, config.hidden, attention.bias)
        self.index_kind = layer.index
        self.indexer = (
            LightningIndexer(config, attention, attention.indexer, number)
            if attention.indexer and layer.index == "full"
            else None
        )

    def cache_shapes(self) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {"latent": (self.shape.kv_rank + self.shape.rope_size,)}
        return shapes | ({"index": (self.indexer.size,)} if self.indexer is not None else {})

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        return {}

    def forward(self, x_TD: Tensor, context: ForwardContext) -> Tensor:
        ops, shape = context.ops, self.shape
        query_TQ = x_TD
        if self.q_down is not None and self.q_norm is not None:
            query_TQ = self.q_norm(self.q_down(x_TD, ops), ops)
        cache = context.cache_layer(self.number)
        if self.indexer is not None:
            context.selected = self.indexer(x_TD, query_TQ, context, cache)
        call = LatentCall(
            q_THC=self.q_up(query_TQ, ops).unflatten(-1, (-1, shape.key_size)),
            kv_TX=self.kv_down(x_TD, ops),
            norm_K=self.kv_norm.weight,
            eps=self.kv_norm.eps,
            up=self.kv_up.weight,
            expand=partial(self.kv_up, ops=ops),
            plain_size=shape.plain_size,
            rope=context.rope,
            attention=AttentionCall(context.layout, cache, self.scale, None, self.number),
            absorb=context.absorb,
            selected=context.selected if self.index_kind else None,
        )
        if self.index_kind and context.teach is not None:
            note_indexer_loss(call, context)
        return self.out(ops.attend_latent(call).flatten(1), ops)

    def weights(self) -> LatentWeights:
        return LatentWeights(
            self.q_down.weights() if self.q_down is not None else None,
            norm_weights(self.q_norm),
            self.q_up.weights(),
            self.kv_down.weights(),
            self.kv_norm.weights(),
            self.kv_up.weights(),
            self.out.weights(),
            self.shape.heads,
            self.shape.plain_size,
            self.shape.rope_size,
            self.shape.value_size,
            self.interleaved,
            self.scale,
            bool(self.index_kind),
            self.indexer.weights() if self.indexer is not None else None,
        )


class LightningIndexer(nn.Module):
    """DSA (DeepSeek-V3.2, GLM-5): score all earlier tokens with a few light heads, attend to the best `topk` only.

    A choice of tokens has no gradient. An indexer learns from what attention looks at (`indexer_loss.py`), and only
    where it is taught; what it reads is detached, so that the model learns nothing from it.
    """

    def __init__(self, config: ModelConfig, attention: Latent, indexer: Indexer, number: int) -> None:
        super().__init__()
        self.heads, self.size, self.topk, self.number = indexer.heads, indexer.head_size, indexer.topk, number
        self.interleaved = indexer.interleaved
        assert attention.q_rank is not None
        self.queries = Linear(attention.q_rank, self.heads * self.size)
        self.keys = Linear(config.hidden, self.size)
        self.key_norm = nn.LayerNorm(self.size, eps=1e-6)
        self.head_weights = Linear(config.hidden, self.heads)

    def weights(self) -> IndexerWeights:
        norm = NormWeights(self.key_norm.weight, self.key_norm.eps, self.key_norm.bias)
        parts = self.queries.weights(), self.keys.weights(), norm, self.head_weights.weights()
        return IndexerWeights(*parts, self.topk, self.interleaved)

    def forward(
        self, x_TD: Tensor, query_TQ: Tensor, context: ForwardContext, cache: dict[str, Tensor] | None
    ) -> list[Tensor | None]:
        ops, layout, teach = context.ops, context.layout, context.teach
        rope = replace(context.rope, interleaved=self.interleaved)
        assert layout.trees is None, "a selection would count the other branches of a tree"
        with torch.set_grad_enabled(teach is not None and torch.is_grad_enabled()):
            x_TD, query_TQ = x_TD.detach(), query_TQ.detach()
            scores = teach is not None or any(span.total > self.topk for span in layout.spans)
            q_THC = self.queries(query_TQ, ops).unflatten(-1, (self.heads, self.size)) if scores else None
            norm = NormWeights(self.key_norm.weight, self.key_norm.eps, self.key_norm.bias)
            q_THC, k_TC = ops.index_rows(q_THC, self.keys(x_TD, ops), norm, rope)
            if cache is not None:
                layout.write(cache["index"], k_TC)
            if q_THC is None:
                return [None] * len(layout.spans)
            weights_TH = self.head_weights(x_TD, ops).float() * self.heads**-0.5
            if teach is not None:
                rows = layout.per_sequence(q_THC, k_TC, weights_TH)
                context.index_scores = self.number, [index_scores(*each) for _, *each in rows]
        if teach == "dense":
            return [None] * len(layout.spans)
        with torch.no_grad():
            return ops.select_tokens(q_THC, k_TC, weights_TH, layout, cache, self.topk)
