"""Heavy hitters in 2 bits, fewer of them in later layers (MiniKV: 2-Bit Layer-Discriminative KV Cache).

    moesaic serve DIR --kv-policy minikv --kv share=0.5

After the prefill the newest rows and those with the most attention are retained, more of them in earlier layers than in
later ones, and quantized to 2 bits but for the first and the newest tokens: keys with a scale for each channel of a
block of tokens (sub-channel), values with one for each token. Generated tokens are never pruned, and quantized block by
block.

Keys are quantized for the least error under the last queries, not to the nearest codes, and the first tokens, which
every other attends to, are not quantized. The paper has neither; on a small model both help (`docs/LOG.md`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from moesaic.serve.core.kv.encoding import Encoding
from moesaic.serve.core.kv_policies import (
    AttentionStatistics,
    Budgeted,
    Retained,
    check_pool,
    next_round,
    pooled,
    top_rows,
)


@dataclass(frozen=True)
class MiniKV(Budgeted):
    share: float = 0.5  # of the tokens, on average over the layers
    falling: float = 0.5  # 0: all layers retain the same; 0.5: the first one half as much again, the last half of it
    newest: float = 0.1  # of the budget
    window: int = 16  # last tokens of the prompt whose attention counts; 0: all
    pool: int = 13  # width of the max pooling over scores; 1: none
    bits: int = 2
    group: int = 16  # tokens of a block
    channels: int = 16  # of a token's value that share a scale
    recent: int = 32  # newest tokens, which are not quantized
    first: int = 4  # and the first ones
    queries: int = 16  # last tokens whose queries keys are quantized for; 0: to the nearest code
    every: int = 0
    encoding: Encoding = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.every:
            raise ValueError("every must be 0: minikv prunes once, and quantizes whenever a group is full")
        if not 0 <= self.falling <= 1 or not 0 <= self.newest <= 1 or self.window < 0:
            raise ValueError("falling and newest must be between 0 and 1, and window not negative")
        check_pool(self.pool)
        made = Encoding(self.bits, self.group, self.channels, self.recent, first=self.first, queries=self.queries)
        object.__setattr__(self, "encoding", made)

    def due(self, computed: int, prompt: int) -> int:
        return next_round(computed, prompt, self.group)

    def score_from(self, due: int, prompt: int) -> int:
        if due > prompt:
            return due
        return max(0, due - self.window) if self.window else 0

    def prune(self, statistics: AttentionStatistics) -> Retained | None:
        budget = self.budget(statistics.computed)
        if statistics.computed > statistics.prompt or budget == statistics.computed:
            return None
        layers = len(statistics.scores_LNM)
        slope_L = 1 + self.falling * torch.linspace(1, -1, layers, device=statistics.scores_LNM.device)
        budget_L = (budget * slope_L).round().clamp(min(self.least, budget), statistics.computed).long()
        newest_L = (budget_L * self.newest).round().long().clamp(min=1)  # which stays in any case
        place_M = torch.arange(statistics.computed, device=statistics.scores_LNM.device)
        ends_L1M = ((place_M >= statistics.computed - newest_L[:, None]) | (place_M < self.first))[:, None]
        between_LNM = pooled(statistics.scores_LNM, self.pool).masked_fill(ends_L1M, -1.0)
        return Retained(ends_L1M | top_rows(between_LNM, (budget_L[:, None] - ends_L1M.sum(-1)).clamp(min=0)))
