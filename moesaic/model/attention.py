"""Attention over a flat batch: grouped-query, and DeepSeek's latent attention with GLM-5's sparse indexer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moesaic.kernels import Kernels, LatentRules
from moesaic.model.config import GroupedQuery, Indexer, Latent, Layer, ModelConfig
from moesaic.model.context import ForwardContext
from moesaic.model.layout import Span
from moesaic.model.linear import Linear, Norm
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
        q_norm_C = self.q_norm.weight if self.q_norm is not None else None
        k_norm_C = self.k_norm.weight if self.k_norm is not None else None
        q_THC, k_TNC, v_TNC = ops.heads(
            qkv_TXC, self.kv_heads, q_norm_C, k_norm_C, self.eps, context.cos_TR, context.sin_TR, self.interleaved
        )
        if layout.compact is not None:
            out_THC = layout.compact.attend(q_THC, k_TNC, v_TNC, layout, self.number, self.scale)
        else:
            out_THC = ops.attend(q_THC, k_TNC, v_TNC, layout, context.cache_layer(self.number), self.scale, self.window)
        return self.out(out_THC.flatten(1), ops)


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
        ops, layout, shape = context.ops, context.layout, self.shape
        query_input = x_TD
        if self.q_down is not None and self.q_norm is not None:
            query_input = self.q_norm(self.q_down(x_TD, ops), ops)
        q_THC = self.q_up(query_input, ops).unflatten(-1, (shape.heads, shape.key_size))
        kv_TX = self.kv_down(x_TD, ops)
        slabs = context.cache_layer(self.number)
        if (out_THX := self._fused(q_THC, kv_TX, context, slabs)) is not None:
            return self.out(out_THX.flatten(1), ops)
        plain_THC, turning_THC = q_THC.split([shape.plain_size, shape.rope_size], dim=-1)
        turning_THC = ops.rotate(turning_THC, context.cos_TR, context.sin_TR, self.interleaved)
        q_THC = torch.cat([plain_THC, turning_THC], dim=-1)

        latent_T, key_T = kv_TX.split([shape.kv_rank, shape.rope_size], dim=-1)
        key_T1C = ops.rotate(key_T.unsqueeze(1), context.cos_TR, context.sin_TR, self.interleaved)
        latent_TX = torch.cat([self.kv_norm(latent_T, ops), key_T1C.squeeze(1)], dim=-1)

        if slabs is not None:
            layout.write(slabs["latent"], latent_TX)
        if self.indexer is not None:
            context.selected = self.indexer(x_TD, query_input, context, slabs)
        selected = context.selected if self.index_kind else None

        pieces = []
        for span, q, latent_MX in layout.per_sequence(q_THC, latent_TX):
            # Where the cache rounds, all see what was rounded.
            in_cache = slabs is not None and (span.cached > 0 or slabs["latent"].dtype != q.dtype)
            if slabs is not None and in_cache:
                latent_MX = layout.read(slabs["latent"], span).to(q)
            keep_TM = selected[span.number] if selected is not None else None
            tree_TM, _ = layout.seen(span, None)
            if tree_TM is not None:
                keep_TM = tree_TM if keep_TM is None else keep_TM & tree_TM
            if keep_TM is not None and span.new == 1:  # one query: drop what it will not look at
                chosen = keep_TM[0].nonzero().squeeze(1)
                latent_MX, keep_TM = latent_MX[chosen], None
            absorb = context.absorb and in_cache and self._absorbing_pays(span)
            attend = self._absorbed if absorb else self._expanded
            pieces.append(attend(q, latent_MX, keep_TM, ops))
        out_THX = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        return self.out(out_THX.flatten(1), ops)

    def _fused(
        self, q_THC: Tensor, kv_TX: Tensor, context: ForwardContext, slabs: dict[str, Tensor] | None
    ) -> Tensor | None:
        """All of it in one call, where there are kernels for that and every token looks at all before it."""
        run, up = getattr(context.ops, "latent", None), self.kv_up.weight
        if run is None or self.index_kind or not isinstance(up, Tensor):
            return None
        rules = LatentRules(
            self.shape.plain_size, self.kv_norm.eps, context.cos_TR, context.sin_TR, self.interleaved, self.scale
        )
        up_HXK = up.unflatten(0, (self.shape.heads, -1))
        out_THX: Tensor | None = run(q_THC, kv_TX, self.kv_norm.weight, up_HXK, rules, context.layout, slabs)
        return out_THX

    def _absorbing_pays(self, span: Span) -> bool:
        """Attention in latent space costs more per query-key pair, but spares expanding every cached latent."""
        shape = self.shape
        per_pair = 2 * shape.kv_rank + shape.rope_size - shape.key_size - shape.value_size
        return span.new * per_pair < shape.kv_rank * (shape.plain_size + shape.value_size)

    def _expanded(self, q_THC: Tensor, latent_MX: Tensor, keep_TM: Tensor | None, ops: Kernels) -> Tensor:
        shape = self.shape
        latent_M, key_M = latent_MX.split([shape.kv_rank, shape.rope_size], dim=-1)
        kv_MHX = self.kv_up(latent_M, ops).unflatten(-1, (shape.heads, -1))
        plain_MHC, v_MHX = kv_MHX.split([shape.plain_size, shape.value_size], dim=-1)
        k_MHC = torch.cat([plain_MHC, key_M.unsqueeze(1).expand(-1, shape.heads, -1)], dim=-1)
        return ops.attention(q_THC, k_MHC, v_MHX, self.scale, keep_TM=keep_TM)

    def _absorbed(self, q_THC: Tensor, latent_MX: Tensor, keep_TM: Tensor | None, ops: Kernels) -> Tensor:
        """Fold the key projection into the query and the value projection into the output: all heads share one key."""
        shape = self.shape
        up_HXK = self.kv_up.weight.unflatten(0, (shape.heads, -1))
        plain_THC, turning_THC = q_THC.split([shape.plain_size, shape.rope_size], dim=-1)
        folded_THK = torch.bmm(plain_THC.transpose(0, 1), up_HXK[:, : shape.plain_size]).transpose(0, 1)
        q_THX = torch.cat([folded_THK, turning_THC], dim=-1)
        keys_M1X = latent_MX.unsqueeze(1)
        # The latent is key and value at once; its rotary part rides along as a value nobody reads.
        out_THK = ops.attention(q_THX, keys_M1X, keys_M1X, self.scale, keep_TM=keep_TM)[..., : shape.kv_rank]
        return torch.bmm(out_THK.transpose(0, 1), up_HXK[:, shape.plain_size :].transpose(1, 2)).transpose(0, 1)


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
        self, x_TD: Tensor, query_TQ: Tensor, context: ForwardContext, slabs: dict[str, Tensor] | None
    ) -> list[Tensor | None]:
        ops, layout = context.ops, context.layout
        assert layout.trees is None, "a selection would count the other branches of a tree"
        k_TC = self.key_norm(self.keys(x_TD, ops))
        k_TC = ops.rotate(k_TC.unsqueeze(1), context.cos_TR, context.sin_TR, self.interleaved).squeeze(1)
        if slabs is not None:
            layout.write(slabs["index"], k_TC)
        if all(span.total <= self.topk for span in layout.spans):
            return [None] * len(layout.spans)
        q_THC = self.queries(query_TQ, ops).unflatten(-1, (self.heads, self.size))
        q_THC = ops.rotate(q_THC, context.cos_TR, context.sin_TR, self.interleaved).float()
        weights_TH = self.head_weights(x_TD, ops).float() * self.heads**-0.5
        selected: list[Tensor | None] = []
        for span in layout.spans:
            rows = slice(span.start, span.stop)
            if span.total <= self.topk or not span.new:
                selected.append(None)
                continue
            cached = slabs is not None and (span.cached > 0 or slabs["index"].dtype != k_TC.dtype)
            k_MC = layout.read(slabs["index"], span) if slabs is not None and cached else k_TC[rows]
            selected.append(self._select(q_THC[rows], k_MC.float(), weights_TH[rows]))
        return selected

    def _select(self, q_THC: Tensor, k_MC: Tensor, weights_TH: Tensor) -> Tensor:
        new, total = q_THC.shape[0], k_MC.shape[0]
        scores_THM = torch.relu(torch.matmul(q_THC, k_MC.T) * self.size**-0.5)
        scores_TM = torch.matmul(weights_TH.unsqueeze(1), scores_THM).squeeze(1)
        last_T1 = torch.arange(total - new, total, device=k_MC.device)[:, None]
        scores_TM = scores_TM.masked_fill(torch.arange(total, device=k_MC.device) > last_T1, float("-inf"))
        # Rectified scores tie at zero, and a library's top-k breaks ties as it likes, differently for another length;
        # here the earliest token wins, so that a sequence gives the same answer however it was split.
        least_T1 = scores_TM.topk(self.topk, dim=-1).values[:, -1:]
        above_TM, tied_TM = scores_TM > least_T1, scores_TM == least_T1
        room_T1 = self.topk - above_TM.sum(-1, keepdim=True)
        return above_TM | (tied_TM & (tied_TM.cumsum(-1) <= room_T1))
