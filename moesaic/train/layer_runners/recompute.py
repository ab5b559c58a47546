"""Activation checkpointing: keep a block's input only, and run the block again in the backward pass."""

from __future__ import annotations

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from moesaic.model.block import Block
from moesaic.model.context import ForwardContext


def recompute(block: Block, number: int, x_TD: Tensor, context: ForwardContext) -> Tensor:
    # The second run must see what the first saw, though later layers have selected since.
    seen = context.selected, context.index_scores

    def run(x_TD: Tensor) -> Tensor:
        context.selected, context.index_scores = seen
        out_TD: Tensor = block(x_TD, context)
        return out_TD

    out_TD: Tensor = checkpoint(run, x_TD, use_reentrant=False)
    return out_TD
