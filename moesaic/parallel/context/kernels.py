"""Kernels of a rank that has some rows of every batch: attention exchanges, all else works on the rows that are here.

    model.ops = ContextParallelKernels(model.ops, group)

The model is given the whole batch, tokens, targets and layout; hidden states are of this rank's rows. Parameters see
their gradients as under data parallelism: the sum over the group is the gradient.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moesaic.kernels.interface import AttentionCall, Batch, Kernels
from moesaic.kernels.wrapped import WrappedKernels
from moesaic.parallel.context.heads import divide_heads, to_heads, to_rows
from moesaic.parallel.rows import RowSplit, SplitKind, Traffic, gather_rows


class ContextParallelKernels(WrappedKernels):
    """`traffic` counts the bytes this rank sent. Under tensor parallelism these are the outer kernels: a loss takes the
    rows of this rank first, then what is left is divided further."""

    def __init__(
        self, plain: Kernels, group: dist.ProcessGroup | None = None, *, split: SplitKind = "contiguous"
    ) -> None:
        super().__init__(plain)
        self.group: Any = group if group is not None else dist.group.WORLD
        self.rank, self.ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.kind: SplitKind = split
        self.traffic = Traffic()
        self._begun: RowSplit | None = None

    def rows(self, layout: Batch) -> Tensor:
        self._begun = self.split(layout)
        return self._begun.parts[self.rank]

    def split(self, layout: Batch) -> RowSplit:
        assert layout.pages_SP is None and not layout.has_trees, "only whole sequences are divided"
        device = layout.spans_S4.device
        return RowSplit.of([span.new for span in layout.spans], self.ranks, self.kind, device)

    def gather(self, rows_T: Tensor, layout: Batch) -> Tensor:
        """The whole batch's rows, for a loss that every rank computes whole (a balance loss over sequences): its
        gradient counts once."""
        return gather_rows(rows_T, self.split(layout), self.group, self.traffic, gradient="own")

    def linear_cross_entropy(
        self, hidden_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, scale_T: Tensor, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """Of the batch whose forward began last, whose targets and scales are whole; the sum and losses of the rows
        that are here."""
        split = self._begun
        assert split is not None and len(targets_T) == split.tokens, "targets of another batch"
        rows_T = split.parts[self.rank]
        return self.plain.linear_cross_entropy(
            hidden_TD, weight_VD, targets_T.index_select(0, rows_T), scale_T.index_select(0, rows_T), **options
        )

    def attend(self, q_THC: Tensor, k_TNC: Tensor, v_TNC: Tensor, call: AttentionCall) -> Tensor:
        split, kv_heads = self.split(call.layout), k_TNC.shape[1]
        shares = divide_heads(q_THC.shape[1], kv_heads, self.ranks)
        mine = shares[self.rank]
        queries = [tuple(range(share.first, share.last)) for share in shares]
        read = [share.kv for share in shares]
        q, k, v = to_heads([q_THC, k_TNC, v_TNC], [queries, read, read], split, self.group, self.traffic)
        if mine.kv_of is not None:
            chosen = torch.tensor(mine.kv_of, device=k.device)
            k, v = k.index_select(1, chosen), v.index_select(1, chosen)
        out_THC = self.plain.attend(q, k, v, call) if mine.heads else q
        return to_rows(out_THC, shares, split, self.group, self.traffic)
