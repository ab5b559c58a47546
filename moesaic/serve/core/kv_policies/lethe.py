"""Prune each layer as its attention allows, again and again (Lethe: Layer- and Time-Adaptive KV Cache Pruning).

    moesaic serve DIR --kv-policy lethe --kv share=0.25

Layers whose attention is spread over many rows get more of the budget than those that look at few. Scores fade by
`decay` with every token, so that what was looked at lately counts most (recency-aware selective retention), the newest
rows stay in any case, and pruning goes on in rounds while an answer is written.
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
    pool: int = 13  # rows that stand beside a row with much attention stay with it; 1: only itself
    unequal: float = 1.0  # 0: all layers get the same; 1: as much as the rows they look at

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.decay <= 1 or not 0 <= self.recent <= 1 or not 0 <= self.unequal <= 1:
            raise ValueError("decay must be above 0 and at most 1, recent and unequal between 0 and 1")
        check_pool(self.pool)

    def score_from(self, due: int, prompt: int) -> int:
        return 0

    def prune(self, statistics: AttentionStatistics) -> Retained | None:
        budget_L = layer_budgets(
            looked_at(statistics.scores_LNM) ** self.unequal,
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


def looked_at(scores_LNM: Tensor) -> Tensor:
    """How many rows a layer's attention is spread over, in effect: the exponential of its entropy, mean over heads."""
    part_LNM = scores_LNM / scores_LNM.sum(-1, keepdim=True).clamp(min=1e-20)
    entropy_LN = -(part_LNM * part_LNM.clamp(min=1e-20).log()).sum(-1)
    return entropy_LN.exp().mean(-1)


def layer_budgets(weight_L: Tensor, mean: int, least: int, most: int) -> Tensor:
    """Rows for every layer in proportion to its weight: none below `least` or above `most`, `mean` of them on average
    (rounded down)."""
    least, total = min(least, mean), mean * len(weight_L)
    share_L = weight_L.double()
    low, high = 0.0, total / float(share_L.min().clamp(min=1e-12))
    for _ in range(60):  # the factor at which the clamped shares add up to the whole
        middle = (low + high) / 2
        low, high = (middle, high) if float((share_L * middle).clamp(least, most).sum()) <= total else (low, middle)
    return (share_L * low + 1e-6).clamp(least, most).floor().long()
