"""Random-LTD: every middle layer works on a fresh random subset of the tokens; the others skip it.

The share kept grows linearly to all over `steps`. First and last layer see every token. With nothing dropped a step is
the plain one, to the bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moesaic.model.block import Block
from moesaic.model.context import ForwardContext
from moesaic.model.layout import Layout
from moesaic.model.transformer import LayerRunner, run_plainly


@dataclass(frozen=True)
class TokenDrop:
    layers: int
    steps: int
    start: float = 0.5  # share kept in the first step
    seed: int = 0

    def share(self, step: int) -> float:
        return min(1.0, self.start + (1 - self.start) * step / max(self.steps, 1))

    def cost(self, step: int) -> float:
        """Layer-tokens of a step, as a share of a full one: what the learning-rate schedule counts in."""
        middle = max(self.layers - 2, 0)
        return 1.0 - (1.0 - self.share(step)) * middle / self.layers

    def at(self, step: int, inner: LayerRunner = run_plainly) -> LayerRunner:
        share = self.share(step)
        if share >= 1.0:
            return inner

        def runner(block: Block, number: int, x_TD: Tensor, context: ForwardContext) -> Tensor:
            if number in (0, self.layers - 1):
                return inner(block, number, x_TD, context)
            tokens = x_TD.shape[0]
            generator = torch.Generator().manual_seed(((self.seed * 1_000_003 + step) * 10_007 + number) % (1 << 63))
            kept_T = torch.randperm(tokens, generator=generator)[: max(1, round(share * tokens))].sort().values
            kept_T = kept_T.to(x_TD.device)
            part = _part(context, kept_T)
            if part.routing is not None:
                part.routing.kept[number] = [span.new for span in part.layout.spans]
            some_TD = inner(block, number, x_TD.index_select(0, kept_T), part)
            return x_TD.index_copy(0, kept_T, some_TD)

        return runner


def _part(context: ForwardContext, kept_T: Tensor) -> ForwardContext:
    """The context of the kept tokens alone: shorter sequences whose tokens keep their positions."""
    layout = context.layout
    assert layout.cache is None, "tokens are dropped in training only"
    ends = torch.tensor([span.stop for span in layout.spans])
    stops = torch.searchsorted(kept_T.cpu(), ends).tolist()
    lengths = [stop - start for start, stop in zip([0, *stops[:-1]], stops, strict=True)]
    part = Layout(lengths, positions=layout.positions_T[kept_T], device=layout.device)
    return context.of_tokens(part, kept_T)
