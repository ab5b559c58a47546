"""Retain what the end of the prompt attends to (SnapKV: LLM Knows What You Are Looking for Before Generation).

    moesaic serve DIR --kv-policy snapkv --kv share=0.25

The last `window` tokens of the prompt vote, head by head, by their attention; votes are pooled, so that what stands
beside a voted token stays with it. Generated tokens are never pruned.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moesaic.serve.core.kv_policies import AttentionStatistics, PromptWindow, Retained, pooled, top_rows


@dataclass(frozen=True)
class SnapKV(PromptWindow):
    def prune(self, statistics: AttentionStatistics) -> Retained | None:
        budget = self.budget(statistics.computed)
        window = min(self.window, budget)
        before = statistics.computed - window
        if budget == statistics.computed:
            return None
        chosen_LNM = top_rows(pooled(statistics.scores_LNM[..., :before], self.pool), budget - window)
        return Retained(torch.cat([chosen_LNM, torch.ones_like(statistics.present_LNM[..., before:])], dim=-1))
