"""What encoders (BERT, ModernBERT) have that decoders have not: LayerNorms, embedded positions, a layer that may norm
after it adds, and a head that classifies a text as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from moesaic.errors import UserError
from moesaic.kernels.interface import EncoderStack, Kernels
from moesaic.kernels.layer_weights import DenseWeights, EncoderLayerWeights, GroupedQueryWeights, NormWeights
from moesaic.model.attention import GroupedQueryAttention
from moesaic.model.config import Classifier, Dense, Encoder, GroupedQuery, Layer, ModelConfig
from moesaic.model.context import ForwardContext
from moesaic.model.experts import make_feed_forward
from moesaic.model.knowledge import KnowledgeReading
from moesaic.model.linear import Linear, Norm, norm_weights

CLASSIFIER = "classifier."  # its parameters


def refuse_encoder(config: ModelConfig, place: object, doing: str) -> None:
    """Where a model is asked for text."""
    if config.encoder is not None:
        problem = f"is an encoder ({config.family}): it reads a text as a whole and writes none, so {doing}"
        raise UserError(place, problem, "Name a language model; moesaic serve and moesaic know embed with an encoder.")


class LayerNorm(Norm):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config.hidden, config.norm_eps)
        self.bias = nn.Parameter(torch.empty(config.hidden)) if shape_of(config).norm_bias else None

    def weights(self) -> NormWeights:
        return NormWeights(self.weight, self.eps, self.bias)

    def forward(self, x_TD: Tensor, ops: Kernels, plus_TD: Tensor | None = None) -> Tensor:
        """Of a sum, where there is something to add."""
        return ops.layer_norm(x_TD, self.weight, self.bias, self.eps, plus_TD)


def shape_of(config: ModelConfig) -> Encoder:
    assert config.encoder is not None
    return config.encoder


def last_norm(config: ModelConfig) -> Norm:
    """None in truth where the layers end with one: who asks for it knows that the model is an encoder."""
    return cast(Norm, None) if shape_of(config).norm_after else LayerNorm(config)


class Entry(nn.Module):
    """From the embeddings of tokens to the first layer: with those of positions and token types, normed."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        shape = shape_of(config)
        self.first = shape.first_position
        self.positions = nn.Parameter(torch.empty(shape.positions, config.hidden)) if shape.positions else None
        self.types = nn.Parameter(torch.empty(shape.token_types, config.hidden)) if shape.token_types else None
        self.norm = LayerNorm(config)

    def forward(self, x_TD: Tensor, context: ForwardContext) -> Tensor:
        ops, layout = context.ops, context.layout
        plus_TD: Tensor | None = None
        if self.positions is not None:
            plus_TD = ops.embed(layout.positions_T + self.first, self.positions, "entry.positions")
        if self.types is not None:
            types_T = layout.token_types
            types_TD = self.types[0] if types_T is None else ops.embed(types_T, self.types, "entry.types")
            x_TD = x_TD + types_TD
        normed_TD: Tensor = self.norm(x_TD, ops, plus_TD)
        return normed_TD


class PlainFeedForward(nn.Module):
    """Without a gate."""

    def __init__(self, config: ModelConfig, dense: Dense) -> None:
        super().__init__()
        self.activation = config.activation
        self.up = Linear(config.hidden, dense.hidden, dense.bias)
        self.down = Linear(dense.hidden, config.hidden, dense.bias)

    def forward(self, x_TD: Tensor, context: ForwardContext) -> Tensor:
        return self.down(context.ops.activate(self.up(x_TD, context.ops), self.activation), context.ops)

    def weights(self) -> DenseWeights:
        return DenseWeights(self.up.weights(), self.down.weights(), self.activation)


class EncoderBlock(nn.Module):
    def __init__(self, config: ModelConfig, layer: Layer, number: int) -> None:
        super().__init__()
        assert isinstance(layer.ffn, Dense)
        self.norm_after = shape_of(config).norm_after
        # Before the first attention there is none: the embeddings were normed.
        self.attention_norm = LayerNorm(config) if self.norm_after or number else None
        assert isinstance(config.attention, GroupedQuery)
        self.attention = GroupedQueryAttention(config, config.attention, layer, number)
        self.ffn_norm = LayerNorm(config)
        self.ffn = (
            make_feed_forward(config, layer.ffn, number) if layer.ffn.gated else PlainFeedForward(config, layer.ffn)
        )

    def forward(self, x_TD: Tensor, context: ForwardContext) -> Tensor:
        ops = context.ops
        if self.norm_after:
            assert self.attention_norm is not None
            x_TD = self.attention_norm(x_TD, ops, self.attention(x_TD, context))
            out_TD: Tensor = self.ffn_norm(x_TD, ops, self.ffn(x_TD, context))
            return out_TD
        normed_TD = x_TD if self.attention_norm is None else self.attention_norm(x_TD, ops)
        x_TD = x_TD + self.attention(normed_TD, context)
        return x_TD + self.ffn(self.ffn_norm(x_TD, ops), context)

    def weights(self) -> EncoderLayerWeights:
        assert not isinstance(self.ffn, KnowledgeReading), "no encoder reads facts"
        attention, ffn = self.attention.weights(), self.ffn.weights()
        assert isinstance(attention, GroupedQueryWeights) and isinstance(ffn, DenseWeights)
        gated = not isinstance(self.ffn, PlainFeedForward)
        norm = norm_weights(self.attention_norm)
        return EncoderLayerWeights(norm, attention, self.ffn_norm.weights(), ffn, gated, self.norm_after)


def run_layers(blocks: Sequence[EncoderBlock], stack: EncoderStack, x_TD: Tensor, context: ForwardContext) -> Tensor:
    """All layers: as one kernel where there is one, or one by one."""
    if not any(block._forward_hooks or block._forward_pre_hooks for block in blocks):
        ropes = [context.angles(block.attention.rope) if block.attention.turns else None for block in blocks]
        if (done_TD := context.ops.run_encoder(stack, x_TD, context.layout, ropes)) is not None:
            return done_TD
    for block in blocks:
        x_TD = block(x_TD, context)
    return x_TD


class ClassifierHead(nn.Module):
    def __init__(self, config: ModelConfig, shape: Classifier) -> None:
        super().__init__()
        self.shape = shape
        self.dense = Linear(config.hidden, config.hidden, shape.bias)
        self.norm = LayerNorm(config) if shape.norm else None
        self.out = Linear(config.hidden, shape.labels, bias=True) if shape.labels else None

    def forward(self, pooled_SD: Tensor, ops: Kernels) -> Tensor:
        """The logits of every label, (S, labels), from one hidden state of each sequence."""
        assert self.out is not None, "a pooler has no labels"
        hidden_SD = ops.activate(self.dense(pooled_SD, ops), self.shape.activation)
        return self.out(hidden_SD if self.norm is None else self.norm(hidden_SD, ops), ops)
