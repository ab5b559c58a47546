"""One layer: attention and feed-forward, each behind a norm and added to the stream; and the multi-token-prediction
layer, which reads the stream together with the next token."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moesaic.model.attention import make_attention
from moesaic.model.config import Layer, ModelConfig
from moesaic.model.context import ForwardContext
from moesaic.model.experts import MixtureFeedForward, make_feed_forward
from moesaic.model.fused_layer import FusedLayer, QuantizedFusedLayer, fused_layer
from moesaic.model.linear import Linear, Norm


class Block(nn.Module):
    def __init__(self, config: ModelConfig, layer: Layer, number: int) -> None:
        super().__init__()
        self.attention_norm = Norm(config.hidden, config.norm_eps)
        self.attention = make_attention(config, layer, number)
        self.ffn_norm = Norm(config.hidden, config.norm_eps)
        self.ffn = make_feed_forward(config, layer.ffn, number)
        self.attention_post_norm = Norm(config.hidden, config.norm_eps) if config.post_norms else None
        self.ffn_post_norm = Norm(config.hidden, config.norm_eps) if config.post_norms else None
        self.parts: FusedLayer | QuantizedFusedLayer | None = None  # found when they are first wanted

    def forward(self, x_TD: Tensor, context: ForwardContext) -> Tensor:
        if context.library is not None and (done_TD := self._at_once(x_TD, context)) is not None:
            return done_TD
        y_TD = self.attention(self.attention_norm(x_TD, context.ops), context)
        if self.attention_post_norm is not None:
            y_TD = self.attention_post_norm(y_TD, context.ops)
        x_TD = x_TD + y_TD
        y_TD = self.ffn(self.ffn_norm(x_TD, context.ops), context)
        if self.ffn_post_norm is not None:
            y_TD = self.ffn_post_norm(y_TD, context.ops)
        return x_TD + y_TD

    def _at_once(self, x_TD: Tensor, context: ForwardContext) -> Tensor | None:
        """The whole layer in one native call, to the same bits, where that can be done: for steps of few tokens."""
        routing, slabs = context.routing, context.cache_layer(self.attention.number)
        if routing is not None and (routing.replay or routing.keep_logits):
            return None
        if self.parts is None or self.parts.matrices[0] is not self.attention_norm.weight:
            self.parts = fused_layer(self)
        if self.parts is None or not self.parts.takes(x_TD, context.layout, slabs):
            return None
        assert slabs is not None and context.library is not None
        y_TD, routes_TK = self.parts.run(context.library, x_TD, context.cos_TR, context.sin_TR, context.layout, slabs)
        if routing is not None and isinstance(self.ffn, MixtureFeedForward):
            routing.choices[self.ffn.router.number] = routes_TK
        return y_TD


class PredictionBlock(nn.Module):
    """Multi-token prediction (DeepSeek-V3, GLM-4.5): from the hidden state before a token and that token, the hidden
    state that predicts the one after it."""

    def __init__(self, config: ModelConfig, layer: Layer, number: int) -> None:
        super().__init__()
        self.token_norm = Norm(config.hidden, config.norm_eps)
        self.hidden_norm = Norm(config.hidden, config.norm_eps)
        self.join = Linear(2 * config.hidden, config.hidden)
        self.block = Block(config, layer, number)
        self.norm = Norm(config.hidden, config.norm_eps)

    def forward(self, hidden_TD: Tensor, next_TD: Tensor, context: ForwardContext) -> Tensor:
        joined = torch.cat([self.token_norm(next_TD, context.ops), self.hidden_norm(hidden_TD, context.ops)], dim=-1)
        return self.norm(self.block(self.join(joined, context.ops), context), context.ops)
