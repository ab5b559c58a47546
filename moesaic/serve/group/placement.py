"""Where the experts of a layer lie: on which of the ranks that share them, and at which place there."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moesaic.serve.group.shares import spans


@dataclass(frozen=True, eq=False)
class Placement:
    """`rank_E` and `place_E`: of each expert its rank within the `ep` ranks, and its number there."""

    rank_E: Tensor
    place_E: Tensor

    @classmethod
    def even(cls, experts: int, ranks: int, device: torch.device) -> Placement:
        """One after the other, as many on each rank."""
        parts = spans(experts, ranks)
        rank_E = torch.cat([torch.full((stop - start,), rank) for rank, (start, stop) in enumerate(parts)])
        place_E = torch.cat([torch.arange(stop - start) for start, stop in parts])
        return cls(rank_E.to(device), place_E.to(device))

    def of(self, experts_A: Tensor) -> tuple[Tensor, Tensor]:
        """The rank and the place there of each of these experts."""
        return self.rank_E[experts_A], self.place_E[experts_A]
