"""Expert load balancing: the auxiliary-loss-free bias and sequence-wise loss (DeepSeek-V3), and the router z-loss."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moesaic.model.config import Experts
from moesaic.model.context import Routing
from moesaic.model.experts import MixtureFeedForward
from moesaic.model.transformer import Model
from moesaic.recipe_sections import BalanceSection


class Balance:
    """Counts the tokens of each expert during a step, updates the balancing bias after it, and computes the losses.

    `add_up` is the sum of counts over all ranks that train on other tokens."""

    def __init__(
        self, model: Model, settings: BalanceSection, add_up: Callable[[Tensor], Tensor] = lambda counts: counts
    ) -> None:
        self.settings, self.add_up = settings, add_up
        blocks = [*model.layers, *(layer.block for layer in model.mtp)]
        self.layers = {n: block.ffn for n, block in enumerate(blocks) if isinstance(block.ffn, MixtureFeedForward)}
        self.loads: dict[int, Tensor] = {}
        self.frozen = model.lora is not None  # biases are no part of an adapter

    def routing(self) -> Routing:
        return Routing(keep_logits=bool(self.settings.sequence_loss or self.settings.z_loss))

    def losses(self, routing: Routing, share: float) -> dict[str, Tensor]:
        """`share` is this part's share of the batch."""
        found = {}
        if self.settings.z_loss and routing.logits:
            z = torch.stack([logits_TE.logsumexp(-1).square().mean() for logits_TE in routing.logits.values()]).mean()
            found["z"] = z * (self.settings.z_loss * share)
        if self.settings.sequence_loss and routing.logits:
            terms = [
                sequence_loss(
                    logits_TE,
                    routing.choices[layer],
                    routing.kept.get(layer, routing.lengths),
                    self.layers[layer].router.shape,
                )
                for layer, logits_TE in routing.logits.items()
            ]
            found["sequence"] = torch.stack(terms).mean() * (self.settings.sequence_loss * share)
        return found

    def count(self, routing: Routing) -> None:
        for layer, routes_TK in routing.choices.items():
            experts = self.layers[layer].router.shape.count
            counts_E = torch.bincount(routes_TK.reshape(-1), minlength=experts)
            self.loads[layer] = self.loads[layer] + counts_E if layer in self.loads else counts_E

    @torch.no_grad()
    def update(self) -> dict[int, Tensor]:
        """Move each bias towards equal load; returns the step's counts by layer and resets them."""
        if self.loads:
            sizes = [len(counts_E) for counts_E in self.loads.values()]
            totals = self.add_up(torch.cat(list(self.loads.values()))).split(sizes)
            self.loads = dict(zip(self.loads, totals, strict=True))
        loads = self.loads
        for layer, counts_E in loads.items():
            correction_E = self.layers[layer].router.correction
            if correction_E is not None and self.settings.bias_rate and not self.frozen:
                counts_E = counts_E.float()
                correction_E += self.settings.bias_rate * torch.sign(counts_E.mean() - counts_E)
        self.loads = {}
        return loads


def sequence_loss(logits_TE: Tensor, routes_TK: Tensor, lengths: list[int], shape: Experts) -> Tensor:
    """DeepSeek-V3's complementary loss: within each sequence, the share of tokens times the mean score, summed."""
    scores_TE = logits_TE.softmax(-1) if shape.score == "softmax" else logits_TE.sigmoid()
    scores_TE = scores_TE / scores_TE.sum(-1, keepdim=True)
    chosen_TE = torch.zeros_like(scores_TE).scatter(1, routes_TK, 1.0)
    total = scores_TE.new_zeros(())
    start = 0
    for length in filter(None, lengths):  # token dropping may leave nothing of a short one
        rows = slice(start, start + length)
        start += length
        load_E = chosen_TE[rows].mean(0) * (shape.count / shape.per_token)
        total = total + length * (load_E * scores_TE[rows].mean(0)).sum()
    return total / max(start, 1)
