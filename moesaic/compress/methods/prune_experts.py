"""Fewer experts: those that give least to a text are left out (router-weighted, as in REAP, Lasby et al. 2025).

moesaic compress out/mixture --method prune_experts --out out/fewer keep=6
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from moesaic.compress.expert_statistics import Use, most_useful, walk_experts
from moesaic.compress.methods import Compressor
from moesaic.model.config import ModelConfig
from moesaic.model.experts import MixtureFeedForward

if TYPE_CHECKING:
    from moesaic.compress.job import Job


@dataclass(frozen=True)
class PruneExperts(Compressor):
    keep: int

    @property
    def ends_bits(self) -> int:
        return 0

    def run(self, job: Job) -> ModelConfig:
        return walk_experts(job, self.keep, self._reduce)

    def _reduce(self, ffn: MixtureFeedForward, use: Use) -> tuple[Tensor, Tensor, Tensor]:
        stay = most_useful(use, self.keep, ffn.router.shape.groups)
        return ffn.gate_up_EGD[stay], ffn.down_EDF[stay], stay
