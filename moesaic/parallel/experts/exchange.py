"""Rows between the ranks of a group: as many as there are (uneven all-to-all), and a count of what was sent.

An exchange is begun at one place and waited for at another, and its gradient the other way round: it sets out where the
rows were waited for, and is waited for where they set out. What is computed between the two overlaps with it in both
passes.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
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

    def rows(self, rows_AD: Tensor, leaving: list[int], arriving: list[int]) -> RowsUnderWay:
        self._count(rows_AD, leaving)
        return RowsUnderWay(rows_AD, leaving, arriving, self.group)

    def _count(self, rows: Tensor, leaving: list[int]) -> None:
        row_bytes = rows.element_size() * (rows[0].numel() if len(rows) else 0)
        self.sent_bytes += row_bytes * (sum(leaving) - leaving[self.rank])


class RowsUnderWay:
    """Begun by being made; `wait` is called once."""

    def __init__(self, rows_AD: Tensor, leaving: list[int], arriving: list[int], group: Any) -> None:
        self.leaving, self.arriving, self.group = leaving, arriving, group
        self._begun: tuple[Any, Tensor] | None = None
        self.token: Tensor = _SetOut.apply(rows_AD, self)

    def wait(self) -> Tensor:
        rows_AD: Tensor = _Arrive.apply(self.token, self)
        return rows_AD

    def begin(self, rows_AD: Tensor, leaving: list[int], arriving: list[int]) -> None:
        found_AD = rows_AD.new_empty((sum(arriving), *rows_AD.shape[1:]))
        given = (found_AD, rows_AD.contiguous(), arriving, leaving)
        self._begun = dist.all_to_all_single(*given, group=self.group, async_op=True), found_AD

    def end(self) -> Tensor:
        assert self._begun is not None
        (work, found_AD), self._begun = self._begun, None
        work.wait()
        return found_AD


class _SetOut(torch.autograd.Function):
    """What it returns holds nothing: it stands for the rows until they are there, and for their gradient."""

    @staticmethod
    def forward(ctx: Any, rows_AD: Tensor, way: RowsUnderWay) -> Tensor:
        ctx.way = way
        way.begin(rows_AD, way.leaving, way.arriving)
        return rows_AD.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.way.end(), None


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, way: RowsUnderWay) -> Tensor:
        ctx.way = way
        return way.end()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.way.begin(grads[0], ctx.way.arriving, ctx.way.leaving)
        return grads[0].new_empty(0), None
