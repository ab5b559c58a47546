"""Which experts a token goes to: softmax or sigmoid scores, group limits, aux-loss-free balance. Always float32."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moesaic.model.config import Experts
from moesaic.model.flow import Routing


class Router(nn.Module):
    def __init__(self, hidden: int, experts: Experts, number: int) -> None:
        super().__init__()
        self.shape, self.number = experts, number
        self.weight = nn.Parameter(torch.empty(experts.count, hidden))
        # Added to the scores for the choice alone; the balance update moves it, no gradient does.
        self.register_buffer("correction", torch.zeros(experts.count) if experts.correction else None)
        self.correction: Tensor | None

    def forward(self, x_TD: Tensor, routing: Routing | None = None) -> tuple[Tensor, Tensor]:
        """The chosen experts (T, K), and the float32 weight of each."""
        logits_TE = F.linear(x_TD.float(), self.weight.float())
        scores_TE = logits_TE.softmax(-1) if self.shape.score == "softmax" else logits_TE.sigmoid()
        if routing is not None and routing.replay:
            routes_TK = routing.choices[self.number]
        else:
            routes_TK = self.choose(scores_TE.detach())
        weights_TK = scores_TE.gather(1, routes_TK)
        if self.shape.normalize:
            tiny = 1e-20 if self.shape.score == "sigmoid" else 0.0
            weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + tiny)
        if routing is not None:
            routing.choices[self.number] = routes_TK
            if routing.keep_logits:
                routing.logits[self.number] = logits_TE
        return routes_TK, weights_TK * self.shape.scale

    def choose(self, scores_TE: Tensor) -> Tensor:
        shape = self.shape
        choice_TE = scores_TE if self.correction is None else scores_TE + self.correction.float()
        if shape.groups > 1:
            choice_TGE = choice_TE.unflatten(-1, (shape.groups, -1))
            best_TG = choice_TGE.topk(2, dim=-1).values.sum(-1).topk(shape.top_groups, dim=-1).indices
            closed_TG = torch.ones_like(choice_TGE[..., 0], dtype=torch.bool).scatter(1, best_TG, False)
            choice_TE = choice_TGE.masked_fill(closed_TG.unsqueeze(-1), float("-inf")).flatten(1)
        return choice_TE.topk(shape.per_token, dim=-1).indices
