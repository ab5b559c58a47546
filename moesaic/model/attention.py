"""Attention over a flat batch: grouped-query, and DeepSeek's latent attention with GLM-5's sparse indexer."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from moesaic.kernels.interface import AttentionCall, LatentCall, QKNorm
from moesaic.kernels.layer_weights import GroupedQueryWeights, LatentWeights
from moesaic.model.config import GroupedQuery, Indexer, Latent, Layer, ModelConfig
from moesaic.model.context import ForwardContext
from moesaic.model.linear import Linear, Norm, norm_weights
from moesaic.model.rope import softmax_scale


def make_attention(config: ModelConfig, layer: Layer, number: int) -> GroupedQueryAttention | LatentAttention:
    if isinstance(config.attention, GroupedQuery):
        return GroupedQueryAttention(config, config.attention, layer, number)
    return LatentAttention(config, config.attention, layer, number)


class GroupedQueryAttention(nn.Module):
    def __init__(self, config: ModelConfig, attention: GroupedQuery, layer: Layer, number: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = attention.heads, attention.kv_heads, attention.head_size
        self.window, self.number, self.interleaved = layer.window, number, config.rope.interleaved
        self.scale, self.eps = self.size**-0.5, config.norm_eps
        self.qkv = Linear(config.hidden, (self.heads + 2 * self.kv_heads) * self.size, attention.qkv_bias)
        self.out = Linear(self.heads * self.size, config.hidden, attention.out_bias)
        self.q_norm = Norm(self.size, config.norm_eps) if attention.qk_norm else None
        self.k_norm = Norm(self.size, config.norm_eps) if attention.qk_norm else None

    def cache_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"keys": (self.kv_heads, self.size), "values": (self.kv_heads, self.size)}

    def forward(self, x_TD: Tensor, context: ForwardContext) -> Tensor:
        ops, layout = context.ops, context.layout
        qkv_TXC = self.qkv(x_TD, ops).unflatten(-1, (-1, self.size))
        norm = None
        if self.q_norm is not None and self.k_norm is not None:
            norm = QKNorm(self.q_norm.weight, self.k_norm.weight, self.eps)
        q_THC, k_TNC, v_TNC = ops.qk_norm_rope(qkv_TXC, self.kv_heads, norm, context.rope)
        call = AttentionCall(layout, context.cache_layer(self.number), self.scale, self.window, self.number)
        return self.out(ops.attend(q_THC, k_TNC, v_TNC, call).flatten(1), ops)

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
        )


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
            LightningIndexer(config, attention, attention.indexer)
            if attention.indexer and layer.index == "full"
            else None
        )

    def cache_shapes(self) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {"latent": (self.shape.kv_rank + self.shape.rope_size,)}
        return shapes | ({"index": (self.indexer.size,)} if self.indexer is not None else {})

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
        )


class LightningIndexer(nn.Module):
    """DSA (DeepSeek-V3.2, GLM-5): score all earlier tokens with a few light heads, attend to the best `topk` only.

    A choice of tokens has no gradient, so nothing here does.
    """

    def __init__(self, config: ModelConfig, attention: Latent, indexer: Indexer) -> None:
        super().__init__()
        self.heads, self.size, self.topk = indexer.heads, indexer.head_size, indexer.topk
        self.interleaved = config.rope.interleaved
        assert attention.q_rank is not None
        self.queries = Linear(attention.q_rank, self.heads * self.size)
        self.keys = Linear(config.hidden, self.size)
        self.key_norm = nn.LayerNorm(self.size, eps=1e-6)
        self.head_weights = Linear(config.hidden, self.heads)

    @torch.no_grad()
    def forward(
        self, x_TD: Tensor, query_TQ: Tensor, context: ForwardContext, cache: dict[str, Tensor] | None
    ) -> list[Tensor | None]:
        ops, layout = context.ops, context.layout
        assert layout.trees is None, "a selection would count the other branches of a tree"
        k_TC = self.key_norm(self.keys(x_TD, ops))
        k_TC = ops.rotate(k_TC.unsqueeze(1), context.rope).squeeze(1)
        if cache is not None:
            layout.write(cache["index"], k_TC)
        if all(span.total <= self.topk for span in layout.spans):
            return [None] * len(layout.spans)
        q_THC = self.queries(query_TQ, ops).unflatten(-1, (self.heads, self.size))
        q_THC = ops.rotate(q_THC, context.rope)
        weights_TH = self.head_weights(x_TD, ops).float() * self.heads**-0.5
        return ops.select_tokens(q_THC, k_TC, weights_TH, layout, cache, self.topk)
