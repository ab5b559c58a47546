"""Prune each layer as its attention allows, again and again (Lethe: Layer- and Time-Adaptive KV Cache Pruning).

    moesaic serve DIR --kv-policy lethe --kv share=0.25

Layers whose attention is spread over many rows get more of the budget than those that attend to few. Scores decay with
every token, so that recent attention counts most (recency-aware selective retention), the newest rows stay in any case,
and pruning is repeated during decode.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moesaic.serve.core.kv_policies import AttentionStatistics, Budgeted, Retained, check_pool, pooled, top_rows


@dataclass(frozen=True)
class Lethe(Budgeted):
    decay: float = 0.95  # of a score, from one token to the next
    recent: float = 0.1  # of a layer's budget
    pool: int = 13  # width of the max pooling over scores; 1: none
    unequal: float = 1.0  # 0: all layers get the same; 1: in proportion to the rows they attend to

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.decay <= 1 or not 0 <= self.recent <= 1 or not 0 <= self.unequal <= 1:
            raise ValueError("decay must be above 0 and at most 1, recent and unequal between 0 and 1")
        check_pool(self.pool)

    def score_from(self, due: int, prompt: int) -> int:
        return 0

    def prune(self, statistics: AttentionStatistics) -> Retained | None:
        budget_L = layer_budgets(
            effective_rows(statistics.scores_LNM) ** self.unequal,
            self.budget(statistics.computed),
            self.least,
            statistics.computed,
        )
        newest_L = (budget_L * self.recent).round().long()
        rows = statistics.scores_LNM.shape[-1]
        place_M = torch.arange(rows, device=statistics.scores_LNM.device)
        newest_L1M = (place_M >= rows - newest_L[:, None])[:, None]
        older_LNM = pooled(statistics.scores_LNM, self.pool).masked_fill(newest_L1M | ~statistics.present_LNM, -1.0)
        return Retained(newest_L1M | top_rows(older_LNM, (budget_L - newest_L)[:, None]))


def effective_rows(scores_LNM: Tensor) -> Tensor:
    """How many rows a layer's attention is spread over: the exponential of its entropy, mean over heads."""
    part_LNM = scores_LNM / scores_LNM.sum(-1, keepdim=True).clamp(min=1e-20)
    entropy_LN = -(part_LNM * part_LNM.clamp(min=1e-20).log()).sum(-1)
    return entropy_LN.exp().mean(-1)


def layer_budgets(weight_L: Tensor, mean: int, least: int, largest: int) -> Tensor:
    """Rows for every layer in proportion to its weight: none below `least` or above `largest`, `mean` of them on
    average (rounded down)."""
    least, total = min(least, mean), mean * len(weight_L)
    share_L = weight_L.double()
    low, high = 0.0, total / float(share_L.min().clamp(min=1e-12))
    for _ in range(60):  # the factor at which the clamped shares add up to the whole
        middle = (low + high) / 2
        fits = float((share_L * middle).clamp(least, largest).sum()) <= total
        low, high = (middle, high) if fits else (low, middle)
    return (share_L * low + 1e-6).clamp(least, largest).floor().long()
