"""Give every head the cache its attention needs (FastGen: Model Tells You What to Discard).

    moesaic serve DIR --kv-policy fastgen --kv share=0.25
    moesaic serve DIR --kv-policy fastgen --kv share=1.0 --kv recover=0.95

A head retains the cheapest of these that recovers enough of the attention of the prompt's last tokens: special tokens;
and punctuation; and the most attended tokens; and the newest; everything. How much is enough is `recover`, or less
where that would take more than `share` of the cache. The structure that a head got after the prompt is applied again
every `every` generated tokens: a head of special tokens keeps no other that was generated, one of the newest moves on.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moesaic.serve.core.kv_policies import AttentionStatistics, Budgeted, Retained, check_pool, pooled, top_rows


@dataclass(frozen=True)
class FastGen(Budgeted):
    every: int = 32
    window: int = 16  # last tokens of the prompt whose attention counts
    pool: int = 13  # width of the max pooling over scores; 1: none
    recover: float = 1.0  # of a head's attention
    frequent: float = 0.1  # of the tokens: most attended ones
    local: float = 0.1  # of the tokens: newest ones

    def __post_init__(self) -> None:
        super().__post_init__()
        check_pool(self.pool)
        if self.window < 1:
            raise ValueError("window must be at least 1")
        if not all(0 < part <= 1 for part in (self.recover, self.frequent, self.local)):
            raise ValueError("recover, frequent and local must be above 0 and at most 1")

    def score_from(self, due: int, prompt: int) -> int:
        return max(0, due - self.window) if due <= prompt else prompt

    def prune(self, statistics: AttentionStatistics) -> Retained | None:
        if statistics.computed <= self.least:
            return None
        kept_RLNM = self.structures(statistics)
        if "structure_LN" not in statistics.notes:
            statistics.notes["structure_LN"] = self.choose(statistics, kept_RLNM)
        structure_LN: Tensor = statistics.notes["structure_LN"]
        return Retained(kept_RLNM.gather(0, structure_LN[None, ..., None].expand_as(kept_RLNM[:1]))[0])

    def choose(self, statistics: AttentionStatistics, kept_RLNM: Tensor) -> Tensor:
        """The structure of each head, by its number."""
        rows_RLN = kept_RLNM.sum(-1)
        mass_RLN = (statistics.scores_LNM * kept_RLNM).sum(-1) / statistics.scores_LNM.sum(-1).clamp(min=1e-20)
        mass_RLN = mass_RLN.clamp(max=1 - 1e-6)  # no rounding may take a part for the whole
        mass_RLN[-1] = 1.0
        enough = self.enough(mass_RLN, rows_RLN, self.budget(statistics.computed) * rows_RLN[0].numel())
        return cheapest(mass_RLN, rows_RLN, enough)

    def structures(self, statistics: AttentionStatistics) -> Tensor:
        """What a head would retain under each structure, each with all that those before it retain."""
        kinds, present_LNM = statistics.kinds(), statistics.present_LNM
        token_T = torch.tensor(list(statistics.tokens), device=present_LNM.device)
        token_LNM = token_T[statistics.positions_LNM.clamp(min=0).long()]
        # Beside the special tokens the attention sink, and the newest row, which stays in any case.
        special_LNM = kinds.special_V[token_LNM] | (statistics.positions_LNM == 0) | statistics.newest(1)
        punctuation_LNM = special_LNM | kinds.punctuation_V[token_LNM]
        votes_LNM = pooled(statistics.scores_LNM, self.pool).masked_fill(~present_LNM, -1.0)
        frequent_LNM = punctuation_LNM | top_rows(votes_LNM, max(1, round(self.frequent * statistics.computed)))
        local_LNM = frequent_LNM | statistics.newest(max(1, round(self.local * statistics.computed)))
        every_LNM = torch.ones_like(local_LNM)
        return torch.stack([special_LNM, punctuation_LNM, frequent_LNM, local_LNM, every_LNM]) & present_LNM

    def enough(self, mass_RLN: Tensor, rows_RLN: Tensor, max_rows: int) -> float:
        """The part of its attention every head can recover within so many rows in all, at most `recover`."""

        def rows(part: float) -> int:
            return int(rows_RLN.gather(0, cheapest(mass_RLN, rows_RLN, part)[None]).sum())

        if rows(self.recover) <= max_rows:
            return self.recover
        low, high = 0.0, self.recover
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (middle, high) if rows(middle) <= max_rows else (low, middle)
        return low


def cheapest(mass_RLN: Tensor, rows_RLN: Tensor, enough: float) -> Tensor:
    """Of each head the structure with the fewest rows among those that recover enough."""
    return rows_RLN.masked_fill(mass_RLN < enough, torch.iinfo(torch.int64).max).argmin(0)
