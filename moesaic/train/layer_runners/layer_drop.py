"""Progressive layer dropping: deeper layers are skipped more often, and all of them more often as training goes on.

Layer l of L runs with probability p = 1 - (l/L)(1 - theta(t)), theta(t) = (1 - floor) exp(-gamma t) + floor; what it
adds is scaled by 1/p when it runs. With floor 1 a step is the plain one, to the bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from moesaic.model.block import Block
from moesaic.model.context import ForwardContext
from moesaic.model.transformer import LayerRunner, run_plainly


@dataclass(frozen=True)
class LayerDrop:
    layers: int
    floor: float = 0.5
    gamma: float = 0.001
    seed: int = 0

    def keep(self, number: int, step: int) -> float:
        theta = (1 - self.floor) * math.exp(-self.gamma * step) + self.floor
        return 1 - (number + 1) / self.layers * (1 - theta)

    def at(self, step: int, inner: LayerRunner = run_plainly) -> LayerRunner:
        if self.floor >= 1:
            return inner

        def runner(block: Block, number: int, x_TD: Tensor, context: ForwardContext) -> Tensor:
            keep = self.keep(number, step)
            if keep >= 1:
                return inner(block, number, x_TD, context)
            generator = torch.Generator().manual_seed(((self.seed * 1_000_003 + step) * 10_009 + number) % (1 << 63))
            if float(torch.rand((), generator=generator)) >= keep:
                return x_TD
            return x_TD + (inner(block, number, x_TD, context) - x_TD) / keep

        return runner
