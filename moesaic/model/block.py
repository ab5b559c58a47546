"""One layer: attention and feed-forward, each behind a norm and added to the stream; and the multi-token-prediction
layer, which reads the stream together with the next token."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moesaic.kernels.interface import LayerStack
from moesaic.kernels.layer_weights import LayerWeights
from moesaic.model.attention import make_attention
from moesaic.model.config import Layer, ModelConfig
from moesaic.model.context import ForwardContext
from moesaic.model.delta_rule import GatedDeltaRule
from moesaic.model.experts import make_feed_forward
from moesaic.model.first_weights import deep_norm
from moesaic.model.knowledge import KnowledgeReading
from moesaic.model.linear import Linear, Norm, norm_weights


class Block(nn.Module):
    def __init__(self, config: ModelConfig, layer: Layer, number: int) -> None:
        super().__init__()
        self.attention_norm = Norm(config.hidden, config.norm_eps, config.norm_offset)
        self.attention = make_attention(config, layer, number)
        self.ffn_norm = Norm(config.hidden, config.norm_eps, config.norm_offset)
        self.ffn = make_feed_forward(config, layer.ffn, number)
        self.attention_post_norm = Norm(config.hidden, config.norm_eps) if config.post_norms else None
        self.ffn_post_norm = Norm(config.hidden, config.norm_eps) if config.post_norms else None
        self._stack: LayerStack | None = None
        # Whether kernels that run several operations in one call may know all of its parts.
        self.fusible = not isinstance(self.ffn, KnowledgeReading) and layer.delta is None

    def forward(self, x_TD: Tensor, context: ForwardContext) -> Tensor:
        if self.fusible and context.layout.cache is not None:
            if (done_TD := context.run_fused(self.stack, x_TD)) is not None:
                return done_TD
        x_TD = self.attend(x_TD, context)
        return self.add(x_TD, self.ffn(self.ffn_norm(x_TD, context.ops), context), context)

    def attend(self, x_TD: Tensor, context: ForwardContext) -> Tensor:
        """The stream after the first half."""
        y_TD = self.attention(self.attention_norm(x_TD, context.ops), context)
        if self.attention_post_norm is not None:
            y_TD = self.attention_post_norm(y_TD, context.ops)
        return x_TD + y_TD

    def add(self, x_TD: Tensor, y_TD: Tensor, context: ForwardContext) -> Tensor:
        """The stream with what the feed-forward half made of it."""
        if self.ffn_post_norm is not None:
            y_TD = self.ffn_post_norm(y_TD, context.ops)
        return x_TD + y_TD

    @property
    def stack(self) -> LayerStack:
        """The layer's weights, for kernels that run more than one operation; made anew when they were replaced."""
        if self._stack is None or self._stack.layers[0].attention_norm.weight is not self.attention_norm.weight:
            self._stack = LayerStack((self.weights(),))
        return self._stack

    def weights(self) -> LayerWeights:
        assert not isinstance(self.ffn, KnowledgeReading), "is not fusible"
        assert not isinstance(self.attention, GatedDeltaRule), "is not fusible"
        return LayerWeights(
            self.attention.number,
            self.attention_norm.weights(),
            self.attention.weights(),
            norm_weights(self.attention_post_norm),
            self.ffn_norm.weights(),
            self.ffn.weights(),
            norm_weights(self.ffn_post_norm),
        )


class PostNormBlock(Block):
    """Each half is added to the stream and then normed. DeepNorm (DeepNet; GLM-130B) first multiplies the stream by
    what grows with the depth, so that no layer changes it much: deep models then train that otherwise diverge."""

    def __init__(self, config: ModelConfig, layer: Layer, number: int) -> None:
        super().__init__(config, layer, number)
        self.alpha = deep_norm(len(config.layers)).alpha if config.norm == "deep" else 1.0
        self.fusible = False

    def forward(self, x_TD: Tensor, context: ForwardContext) -> Tensor:
        x_TD = self.attend(x_TD, context)
        return self.add(x_TD, self.ffn(x_TD, context), context)

    def attend(self, x_TD: Tensor, context: ForwardContext) -> Tensor:
        return self.attention_norm(self.alpha * x_TD + self.attention(x_TD, context), context.ops)

    def add(self, x_TD: Tensor, y_TD: Tensor, context: ForwardContext) -> Tensor:
        return self.ffn_norm(self.alpha * x_TD + y_TD, context.ops)


def make_block(config: ModelConfig, layer: Layer, number: int) -> Block:
    return (Block if config.norm == "pre" else PostNormBlock)(config, layer, number)


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
