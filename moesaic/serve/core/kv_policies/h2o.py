"""Keep heavy hitters and the newest tokens (H2O: Heavy-Hitter Oracle for Efficient Generative Inference of LLMs).

    moesaic serve DIR --kv-policy h2o --kv share=0.25

A row's score is all the attention it has had from every token since it was written. Part of the budget is the newest
rows, the rest those of the highest score, head by head.
"""

from __future__ import annotations

from dataclasses import dataclass

from moesaic.serve.core.kv_policies import AttentionStatistics, Budgeted, Kept, best, check_pool, pooled


@dataclass(frozen=True)
class H2O(Budgeted):
    recent: float = 0.5  # of the budget
    pool: int = 1  # as published; more keeps what stands beside a heavy hitter

    def __post_init__(self) -> None:
        super().__post_init__()
        check_pool(self.pool)
        if not 0 <= self.recent <= 1:
            raise ValueError("recent must be between 0 and 1")

    def watch(self, due: int, prompt: int) -> int:
        return 0

    def prune(self, seen: AttentionStatistics) -> Kept | None:
        budget = self.budget(seen.computed)
        newest_M = seen.newest(round(budget * self.recent))
        older_LNM = pooled(seen.scores_LNM, self.pool).masked_fill(newest_M | ~seen.there_LNM, -1.0)
        return Kept(newest_M | best(older_LNM, budget - round(budget * self.recent)))
