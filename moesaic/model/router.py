"""Which experts a token goes to: softmax or sigmoid scores, group limits, aux-loss-free balance. Always float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn

from moesaic.kernels import reference
from moesaic.kernels.interface import Kernels, Routes
from moesaic.model.config import Experts
from moesaic.model.context import Routing

# What a router called by itself runs on.
PLAIN = cast(Kernels, reference)


class Router(nn.Module):
    site = ""

    def __init__(self, hidden: int, experts: Experts, number: int) -> None:
        super().__init__()
        self.shape, self.number = experts, number
        self.weight = nn.Parameter(torch.empty(experts.count, hidden))
        self.bias = nn.Parameter(torch.empty(experts.count)) if experts.bias else None
        # Added to the scores for the choice alone; the balance update moves it, no gradient does.
        self.register_buffer("correction", torch.zeros(experts.count) if experts.correction else None)
        self.correction: Tensor | None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Router:
        """What all modules do when they are moved or made another format. The correction stays in float32, where small
        moves of it are not rounded away."""
        kept = self.correction
        super()._apply(fn, recurse)
        if kept is not None and self.correction is not None and self.correction.dtype != kept.dtype:
            self.correction = kept.to(self.correction.device)
        return self

    def forward(self, x_TD: Tensor, routing: Routing | None = None, ops: Kernels = PLAIN) -> Routes:
        logits_TE = ops.router_logits(x_TD, self.weight, self.site)
        if self.bias is not None:
            logits_TE = logits_TE + self.bias.float()
        replayed_TK = routing.choices[self.number] if routing is not None and routing.replay else None
        routes = ops.route(logits_TE, self.correction, self.shape, replayed_TK)
        if routing is not None:
            routing.choices[self.number] = routes.experts_TK
            if routing.keep_logits:
                routing.logits[self.number] = logits_TE
        return routes
