"""Which copy of an expert computes a row: in turn, so that every copy gets as many; fixed by the batch, so that all
ranks that know it choose the same."""

from __future__ import annotations

import torch
from torch import Tensor

from moesaic.parallel.experts.placement import SlotPlan


class Holders:
    """A plan of one layer as a table: the ranks that hold each expert (E, most copies)."""

    def __init__(self, plan: SlotPlan, experts: int) -> None:
        self.plan = plan
        holders = [plan.holders(expert) for expert in range(experts)]
        widest = max(len(ranks) for ranks in holders)
        # A row is filled up with its own ranks, so that whatever is looked up holds the expert.
        self.rank_EC = torch.tensor([(ranks * widest)[:widest] for ranks in holders])
        self.copies_E = torch.tensor([len(ranks) for ranks in holders])

    def choose(self, experts_TK: Tensor, turn: int) -> Tensor:
        """The rank of each assignment (T, K): the n-th row that wants an expert goes to its copy number n + `turn`."""
        flat_A = experts_TK.reshape(-1)
        if self.rank_EC.shape[1] == 1:
            return self.rank_EC[:, 0][flat_A].view_as(experts_TK)
        order_A = flat_A.argsort(stable=True)
        counts_E = torch.bincount(flat_A, minlength=len(self.copies_E))
        starts_E = counts_E.cumsum(0) - counts_E
        place_A = torch.empty_like(flat_A)
        place_A[order_A] = torch.arange(len(flat_A)) - starts_E[flat_A[order_A]]
        copy_A = (place_A + turn) % self.copies_E[flat_A]
        return self.rank_EC[flat_A, copy_A].view_as(experts_TK)


def add_in_order(y_TKD: Tensor, experts_TK: Tensor) -> Tensor:
    """A token's sum of what its experts gave, in the order of the experts, as one process adds them."""
    order_TK = experts_TK.argsort(dim=1, stable=True)
    out_TD = torch.zeros_like(y_TKD[:, 0])
    rows_T = torch.arange(len(y_TKD), device=y_TKD.device)
    for choice in range(y_TKD.shape[1]):
        out_TD += y_TKD[rows_T, order_TK[:, choice]]
    return out_TD
