"""GLM-130B's embedding-gradient shrink: the embedding learns from a share of its gradient, which steadies training."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from moesaic.model.block import Block
from moesaic.model.context import ForwardContext
from moesaic.model.transformer import LayerRunner, run_plainly


@dataclass(frozen=True)
class EmbeddingShrink:
    share: float = 1.0

    def at(self, step: int, inner: LayerRunner = run_plainly) -> LayerRunner:
        if self.share == 1.0:
            return inner

        def runner(block: Block, number: int, x_TD: Tensor, context: ForwardContext) -> Tensor:
            if number == 0:
                # The same numbers going forward, a share of the gradient going back. Only the rows that were looked
                # up are shrunk: an output matrix tied to the embedding learns at full rate.
                x_TD = x_TD.detach() + self.share * (x_TD - x_TD.detach())
            return inner(block, number, x_TD, context)

        return runner
