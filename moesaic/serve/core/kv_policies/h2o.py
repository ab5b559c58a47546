"""Keep heavy hitters and the newest tokens (H2O: Heavy-Hitter Oracle for Efficient Generative Inference of LLMs).

    moesaic serve DIR --kv-policy h2o --kv share=0.25

A row's score is the sum of the attention of every token since it was written. Part of the budget is the newest rows,
the rest those of the highest score, head by head.
"""

from __future__ import annotations

from dataclasses import dataclass

from moesaic.serve.core.kv_policies import AttentionStatistics, Budgeted, Retained, check_pool, pooled, top_rows


@dataclass(frozen=True)
class H2O(Budgeted):
    recent: float = 0.5  # of the budget
    pool: int = 1  # as published; width of the max pooling over scores

    def __post_init__(self) -> None:
        super().__post_init__()
        check_pool(self.pool)
        if not 0 <= self.recent <= 1:
            raise ValueError("recent must be between 0 and 1")

    def score_from(self, due: int, prompt: int) -> int:
        return 0

    def prune(self, statistics: AttentionStatistics) -> Retained | None:
        budget = self.budget(statistics.computed)
        newest_M = statistics.newest(round(budget * self.recent))
        older_LNM = pooled(statistics.scores_LNM, self.pool).masked_fill(newest_M | ~statistics.present_LNM, -1.0)
        return Retained(newest_M | top_rows(older_LNM, budget - round(budget * self.recent)))
