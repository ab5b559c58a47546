"""Rows between the ranks of a group: as many as there are (uneven all-to-all), and a count of what was sent."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch import Tensor

from moesaic.parallel.staying_up.activity import Activity


class Exchange:
    """`sent_bytes` counts what leaves this rank in forward passes; the backward pass sends as many rows back."""

    def __init__(self, group: dist.ProcessGroup | None = None, activity: Activity | None = None) -> None:
        self.group: Any = group if group is not None else dist.group.WORLD
        self.ranks = dist.get_world_size(self.group)
        self.rank = dist.get_rank(self.group)
        self.sent_bytes = 0
        self.activity = activity or Activity()

    def counts(self, leaving_RC: Tensor) -> Tensor:
        """How many of each kind go to every rank, for how many come from it. Ranks with nothing to send take part."""
        arriving_RC = torch.empty_like(leaving_RC)
        with self.activity.doing("dispatch"):
            dist.all_to_all_single(arriving_RC, leaving_RC.contiguous(), group=self.group)
        return arriving_RC

    def numbers(self, values_A: Tensor, leaving: list[int], arriving: list[int]) -> Tensor:
        """Integers that take no gradient."""
        self._count(values_A, leaving)
        found_A = values_A.new_empty((sum(arriving), *values_A.shape[1:]))
        dist.all_to_all_single(found_A, values_A.contiguous(), arriving, leaving, group=self.group)
        return found_A

    def rows(self, rows_AD: Tensor, leaving: list[int], arriving: list[int]) -> Tensor:
        """Begun here; whoever uses the result waits for it. Gradients travel back the same way."""
        self._count(rows_AD, leaving)
        begun: Tensor = collectives.all_to_all_single_autograd(rows_AD.contiguous(), arriving, leaving, self.group)
        return begun

    def _count(self, rows: Tensor, leaving: list[int]) -> None:
        row_bytes = rows.element_size() * (rows[0].numel() if len(rows) else 0)
        self.sent_bytes += row_bytes * (sum(leaving) - leaving[self.rank])


def waited(rows: Tensor) -> Tensor:
    """The rows themselves, once they are there."""
    wait = getattr(rows, "wait", None)
    return wait() if wait is not None else rows
