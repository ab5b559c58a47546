"""Tokens routed to each expert of each layer: expert load, as the live view and the metrics show it."""

from __future__ import annotations

import torch

from moesaic.model.config import Experts
from moesaic.model.context import Routing
from moesaic.model.transformer import Model


class ExpertCounts:
    def __init__(self, model: Model) -> None:
        self.experts = {
            number: layer.ffn.count
            for number, layer in enumerate(model.config.layers)
            if isinstance(layer.ffn, Experts)
        }
        self.starts: dict[int, int] = {}
        total = 0
        for number, count in self.experts.items():
            self.starts[number] = total
            total += count
        self.counts = torch.zeros(total, dtype=torch.int64, device=model.device)

    def count(self, routing: Routing) -> None:
        """All layers of one forward at once."""
        routed = [
            routes.flatten() + self.starts[layer] for layer, routes in routing.choices.items() if layer in self.starts
        ]
        if routed:
            self.counts += torch.bincount(torch.cat(routed), minlength=len(self.counts))

    def by_layer(self) -> dict[int, list[int]]:
        counts = self.counts.tolist()
        return {layer: counts[start : start + self.experts[layer]] for layer, start in self.starts.items()}
