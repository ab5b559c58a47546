"""All layers of a model as one piece, for kernels that can run them so; `Block.forward` says what it means."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from moesaic.kernels.native.fused_layer import FusedLayer
from moesaic.kernels.native.fused_model import MOST_TOKENS, FusedModel
from moesaic.kernels.native.quantized_fused import QuantizedFusedModel
from moesaic.model.context import ForwardContext
from moesaic.model.experts import MixtureFeedForward
from moesaic.model.fused_layer import fused_layer

if TYPE_CHECKING:
    from moesaic.model.block import Block
    from moesaic.model.transformer import Model


def run_fused(model: Model, x_TD: Tensor, context: ForwardContext) -> Tensor | None:
    """What comes out of the last layer, to the same bits as layer by layer; None where that is the way to go."""
    layout, routing = context.layout, context.routing
    few = context.library is not None and x_TD.shape[0] <= MOST_TOKENS and layout.cache is not None
    if not few or layout.branches or torch.is_grad_enabled() or x_TD.dtype != torch.float32:
        return None
    if routing is not None and (routing.replay or routing.keep_logits):
        return None
    stack = _stack(model)
    assert layout.cache is not None
    slabs = layout.cache.layers[: len(model.layers)]
    if stack is None or not stack.takes() or slabs[0]["keys"].dtype != torch.float32:
        return None
    y_TD, routes_LTK = stack.run(context.library, x_TD, context.cos_TR, context.sin_TR, layout, slabs)
    if routing is not None:
        routing.choices.update(
            (number, routes_TK)
            for number, routes_TK in zip(stack.routers, routes_LTK, strict=True)
            if number is not None
        )
    return y_TD


def _stack(model: Model) -> FusedModel | None:
    """Made when it is first wanted, and again when a layer is another than it was; None if one has to go alone."""
    blocks = cast("list[Block]", list(model.layers))
    for block in blocks:
        if block._forward_hooks or block._forward_pre_hooks:  # somebody wants to come between
            return None
        if block.parts is None or block.parts.matrices[0] is not block.attention_norm.weight:
            block.parts = fused_layer(block)
        if block.parts is None or type(block.parts) is not type(blocks[0].parts):
            return None
    parts: list[Any] = [block.parts for block in blocks]
    if model.stack is None or any(one is not other for one, other in zip(parts, model.stack.layers, strict=True)):
        routers = [b.ffn.router.number if isinstance(b.ffn, MixtureFeedForward) else None for b in blocks]
        model.stack = (
            FusedModel(parts, routers) if isinstance(parts[0], FusedLayer) else QuantizedFusedModel(parts, routers)
        )
    return model.stack
