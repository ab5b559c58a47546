"""Kernels whose matmuls add low-rank corrections (LoRA): of adapters that requests bring, or of one being trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from moesaic.kernels.interface import Kernels, LatentCall
from moesaic.kernels.latent_attention import attend_latent
from moesaic.kernels.wrapped import WrappedKernels


class Corrections(Protocol):
    def correction(self, site: str) -> tuple[Tensor, Tensor] | None:
        """The down (r, I) and up (O, r) matrices that correct the matrix of a call site, if it is corrected."""


Adapter = TypeVar("Adapter", bound=Corrections)


class AdaptedKernels(WrappedKernels):
    """Each adapter corrects its rows of the flat batch, or all (None). The model does not know."""

    def __init__(self, plain: Kernels, rows: Mapping[Adapter, Tensor | None]) -> None:
        super().__init__(plain)
        self._rows: dict[Corrections, Tensor | None] = {adapter: own for adapter, own in rows.items()}

    def linear(self, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None, site: str = "") -> Tensor:
        out_TO = self.plain.linear(x_TI, weight_OI, bias_O, site)
        chosen = {adapter: rows for adapter, rows in self._rows.items() if rows is not None}
        if out_TO.is_cuda and chosen:  # the bits of graphed steps
            return self._add_on_device(out_TO, x_TI, site, chosen)
        for adapter, rows in self._rows.items():
            correction = adapter.correction(site)
            if correction is None:
                continue
            down_RI, up_OR = correction
            low_TR = self.plain.linear(x_TI if rows is None else x_TI.index_select(0, rows), down_RI)
            added_TO = self.plain.linear(low_TR, up_OR)
            out_TO = out_TO + added_TO if rows is None else out_TO.index_add(0, rows, added_TO)
        return out_TO

    def _add_on_device(self, out_TO: Tensor, x_TI: Tensor, site: str, chosen: Mapping[Corrections, Tensor]) -> Tensor:
        from moesaic.kernels.triton.low_rank import LowRank, add_low_rank  # Triton, which is on machines with a GPU

        here = {a: correction for a in chosen if (correction := a.correction(site)) is not None}
        if not here:
            return out_TO
        rank = max(len(down_RI) for down_RI, _ in here.values())
        matrices = LowRank.empty(len(here), rank, *next(iter(here.values())))
        adapters_T = torch.zeros(len(out_TO), dtype=torch.int32, device=out_TO.device)
        for number, (adapter, correction) in enumerate(here.items(), start=1):
            matrices.write(number, correction)
            adapters_T[chosen[adapter]] = number
        return add_low_rank(out_TO, x_TI, matrices, adapters_T)

    def attend_latent(self, call: LatentCall) -> Tensor:
        return attend_latent(call, self.plain.rms_norm, self.plain.rotate, self.plain.attention)
