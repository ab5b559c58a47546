"""Fewer experts: each that is left out is blended into the most similar that stays, by how often both are chosen.

moesaic compress out/mixture --method merge_experts --out out/fewer keep=6

Similar means the angle between all their weights, as for experts that began as copies of one network (upcycling).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.compress.expert_reduction import ExpertReduction, Use, most_useful
from moesaic.model.experts import MixtureFeedForward


@dataclass(frozen=True)
class MergeExperts(ExpertReduction):
    def reduce(self, ffn: MixtureFeedForward, use: Use) -> tuple[Tensor, Tensor, Tensor]:
        stay = most_useful(use, self.keep, ffn.router.shape.groups)
        flat_EX = torch.cat([ffn.gate_up_EGD.flatten(1), ffn.down_EDF.flatten(1)], dim=1)
        flat_EX = F.normalize(flat_EX, dim=1)
        home_E = (flat_EX @ flat_EX[stay].T).argmax(1)
        home_E[stay] = torch.arange(len(stay), device=stay.device)
        share_EK = F.one_hot(home_E, len(stay)).float() * use.chosen_E.clamp(min=1e-3)[:, None]
        share_EK = share_EK / share_EK.sum(0)
        gate_up = torch.einsum("ek,egd->kgd", share_EK, ffn.gate_up_EGD)
        return gate_up, torch.einsum("ek,edf->kdf", share_EK, ffn.down_EDF), stay
