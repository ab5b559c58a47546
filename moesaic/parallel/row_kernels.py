"""Kernels of a rank that is given whole batches and has hidden states of its own rows only."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from moesaic.kernels.wrapped import WrappedKernels


class RowKernels(WrappedKernels):
    def own_rows(self, tokens: int) -> slice | Tensor:
        """This rank's rows of a batch of so many tokens."""
        raise NotImplementedError

    def embed(self, tokens_T: Tensor, table_VD: Tensor, site: str = "") -> Tensor:
        return self.plain.embed(tokens_T[self.own_rows(len(tokens_T))], table_VD, site)

    def linear_cross_entropy(
        self, hidden_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, scale_T: Tensor, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """Targets and scales are the whole batch's; the sum and the losses are of the rows that are here."""
        own = self.own_rows(len(targets_T))
        return self.plain.linear_cross_entropy(hidden_TD, weight_VD, targets_T[own], scale_T[own], **options)
