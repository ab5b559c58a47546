"""Fewer experts: those that give least to a text are left out (router-weighted, as in REAP, Lasby et al. 2025).

moesaic compress out/mixture --method prune_experts --out out/fewer keep=6
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from moesaic.compress.expert_reduction import ExpertReduction, Use, most_useful
from moesaic.model.experts import MixtureFeedForward


@dataclass(frozen=True)
class PruneExperts(ExpertReduction):
    def reduce(self, ffn: MixtureFeedForward, use: Use) -> tuple[Tensor, Tensor, Tensor]:
        stay = most_useful(use, self.keep, ffn.router.shape.groups)
        return ffn.gate_up_EGD[stay], ffn.down_EDF[stay], stay
