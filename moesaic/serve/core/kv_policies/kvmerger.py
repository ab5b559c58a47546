"""Merge neighbours with similar keys (KVMerger: Model Tells You Where to Merge).

    moesaic serve DIR --kv-policy kvmerger --kv share=0.5

Rows that follow each other and whose keys are alike form a set; every set becomes one row, its most attended one, onto
which the others are added with weights of a Gaussian kernel of the distance between keys. A head is cut where
neighbours are least alike, as often as the budget allows. The newest rows and the heavy hitters are not merged.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moesaic.serve.core.kv_policies import AttentionStatistics, Budgeted, Retained, check_pool, pooled, top_rows


@dataclass(frozen=True)
class KVMerger(Budgeted):
    share: float = 0.5
    recent: float = 0.1  # of the budget: newest rows
    heavy: float = 0.5  # of the budget: rows with the most attention
    pool: int = 13  # width of the max pooling over scores; 1: none
    window: int = 16  # last tokens of the prompt whose attention counts; 0: all
    every: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.every:
            raise ValueError("every must be 0: kvmerger merges once, after the prompt")
        if min(self.recent, self.heavy) < 0 or self.recent + self.heavy > 0.9:
            raise ValueError("recent and heavy must not be negative, and together at most 0.9")
        check_pool(self.pool)
        if self.window < 0:
            raise ValueError("window must not be negative")

    def score_from(self, due: int, prompt: int) -> int:
        return max(0, due - self.window) if self.window else 0

    def prune(self, statistics: AttentionStatistics) -> Retained | None:
        budget = self.budget(statistics.computed)
        if budget == statistics.computed:
            return None
        newest_M = statistics.newest(max(1, round(budget * self.recent)))
        votes_LNM = pooled(statistics.scores_LNM, self.pool).masked_fill(newest_M, -1.0)
        whole_LNM = newest_M | top_rows(votes_LNM, round(budget * self.heavy))
        onto = [
            self.sets(statistics.keys(layer), statistics.scores_LNM[layer], whole_LNM[layer].int() + newest_M, budget)
            for layer in range(len(whole_LNM))
        ]
        onto_LNM = torch.stack(onto)
        return Retained(onto_LNM == torch.arange(statistics.computed, device=onto_LNM.device), onto_LNM)

    def sets(self, keys_NMC: Tensor, scores_NM: Tensor, whole_NM: Tensor, budget: int) -> Tensor:
        """For every row the one that stands for its set; `budget` sets in each head. Rows that are whole (1, or 2 where
        room must be found for them first) are sets of their own."""
        heads, rows = scores_NM.shape
        unit_NMC = torch.nn.functional.normalize(keys_NMC.float(), dim=-1)
        alike_NM = (unit_NMC[:, 1:] * unit_NMC[:, :-1]).sum(-1)  # each row with the one before it, from the second on
        # Cut on both sides of what stays whole, and then where neighbours are least alike.
        must_NM = torch.maximum(whole_NM[:, 1:], whole_NM[:, :-1])
        cuts_NM = top_rows(torch.where(must_NM > 0, 1.0 + must_NM, -alike_NM), budget - 1)
        number_NM = torch.nn.functional.pad(cuts_NM.long(), (1, 0)).cumsum(-1)
        highest = torch.full((heads, budget), -1.0, device=scores_NM.device)
        highest.scatter_reduce_(1, number_NM, scores_NM, "amax")
        place_NM = torch.arange(rows, device=scores_NM.device).expand(heads, rows)
        # Of equals the oldest.
        leading_NM = torch.where(scores_NM == highest.gather(1, number_NM), place_NM, rows)
        pivot = torch.full((heads, budget), rows, device=scores_NM.device)
        pivot.scatter_reduce_(1, number_NM, leading_NM, "amin")
        return pivot.gather(1, number_NM)

    def merge(self, keys_NMC: Tensor, values_NMC: Tensor, onto_NM: Tensor) -> tuple[Tensor, Tensor]:
        index = onto_NM[..., None].expand_as(keys_NMC)
        distance_NM = (keys_NMC.float() - keys_NMC.float().gather(1, index)).norm(dim=-1)
        ones_NM = torch.ones_like(distance_NM)
        in_set_NM = torch.zeros_like(ones_NM).scatter_add_(1, onto_NM, ones_NM).gather(1, onto_NM)
        total_NM = torch.zeros_like(ones_NM).scatter_add_(1, onto_NM, distance_NM).gather(1, onto_NM)
        sigma_NM = (total_NM / in_set_NM).clamp(min=1e-6)  # the mean distance within the set
        weight_NM = torch.exp(-(distance_NM**2) / (2 * sigma_NM**2))
        sum_NM = torch.zeros_like(ones_NM).scatter_add_(1, onto_NM, weight_NM).gather(1, onto_NM)
        weight_NM1 = (weight_NM / sum_NM)[..., None]
        merged = [
            torch.zeros_like(x_NMC, dtype=torch.float32).scatter_add_(1, index, weight_NM1 * x_NMC.float())
            for x_NMC in (keys_NMC, values_NMC)
        ]
        return merged[0].to(keys_NMC.dtype), merged[1].to(values_NMC.dtype)
