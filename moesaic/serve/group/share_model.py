"""A model of which a rank holds its share. What rank 0 runs of it outside a step, the others are told first."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from moesaic.kernels import Kernels, Mode
from moesaic.model.config import ModelConfig
from moesaic.model.context import Routing
from moesaic.model.layout import Layout
from moesaic.model.transformer import Model


class ShareModel(Model):
    """`announce` tells the others of a forward of a multi-token-prediction layer."""

    def __init__(self, config: ModelConfig, mode: Mode = "fast") -> None:
        super().__init__(config, mode)
        self.announce: Callable[[int, Tensor, Tensor, Layout], None] | None = None

    def predict_further(
        self,
        number: int,
        hidden_TD: Tensor,
        next_T: Tensor,
        layout: Layout,
        routing: Routing | None = None,
        ops: Kernels | None = None,
    ) -> Tensor:
        if self.announce is not None:
            self.announce(number, hidden_TD, next_T, layout)
        return super().predict_further(number, hidden_TD, next_T, layout, routing, ops)
