"""Which units of a request's pages each layer and head uses, in order; the slots of a head are the rows of its units.

Units in use are numbered from 0 without gaps, so that a request needs no more pages than its units fill.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from moesaic.serve.core.kv.store import Store


class Units:
    def __init__(self, store: Store) -> None:
        self.store = store
        self.owned_LN = torch.zeros(store.layers, store.heads, dtype=torch.int64)
        self.units_LNK = torch.zeros(store.layers, store.heads, 0, dtype=torch.int64)

    def pages(self, slots_LN: Tensor) -> int:
        """How many pages a request has when every head has at least so many slots."""
        return -(-int(torch.maximum(self._needed(slots_LN), self.owned_LN).sum()) // self.store.units)

    @property
    def pages_owned(self) -> int:
        """How many pages it has."""
        return -(-int(self.owned_LN.sum()) // self.store.units)

    def _needed(self, slots_LN: Tensor) -> Tensor:
        return (slots_LN + self.store.page_size - 1) // self.store.page_size

    def grow(self, slots_LN: Tensor) -> None:
        """Give heads units behind all that are in use."""
        wanted_LN = torch.maximum(self._needed(slots_LN), self.owned_LN)
        if not torch.equal(wanted_LN, self.owned_LN):
            inside_LNK = self._widen(wanted_LN)
            fresh_LNK = inside_LNK & (torch.arange(inside_LNK.shape[-1]) >= self.owned_LN[..., None])
            first = int(self.owned_LN.sum())
            self.units_LNK[fresh_LNK] = torch.arange(first, first + int(fresh_LNK.sum()))
            self.owned_LN = wanted_LN

    def fit(self, slots_LN: Tensor) -> None:
        """Leave every head as many units as it needs: of its first ones those whose numbers are low enough to stay, and
        for the others numbers that have become free."""
        wanted_LN = self._needed(slots_LN)
        inside_LNK, total = self._widen(wanted_LN), int(wanted_LN.sum())
        had_LNK = torch.arange(inside_LNK.shape[-1]) < self.owned_LN[..., None]
        stays_LNK = inside_LNK & had_LNK & (self.units_LNK < total)
        free = torch.ones(total, dtype=torch.bool)
        free[self.units_LNK[stays_LNK]] = False
        self.units_LNK[inside_LNK & ~stays_LNK] = free.nonzero().flatten()
        self.units_LNK = self.units_LNK[..., : int(wanted_LN.max())]
        self.owned_LN = wanted_LN

    def _widen(self, wanted_LN: Tensor) -> Tensor:
        """Make room for so many units of each head; which places those are."""
        layers, heads, width = self.units_LNK.shape
        if (more := int(wanted_LN.max()) - width) > 0:
            self.units_LNK = torch.cat([self.units_LNK, self.units_LNK.new_zeros(layers, heads, more)], dim=-1)
        return torch.arange(self.units_LNK.shape[-1]) < wanted_LN[..., None]

    def rows(self, slots_LNX: Tensor, pages: Sequence[int], layers: list[int] | None = None) -> Tensor:
        """The rows, numbered through the whole cache, of the given slots of each head, of all layers or some; on the
        device of the cache."""
        # In numpy: it takes half of torch's time where there are few of them, as in steps of decoding.
        store, slots = self.store, slots_LNX.numpy()
        units_LNK = (self.units_LNK if layers is None else self.units_LNK[layers]).numpy()
        unit = np.take_along_axis(units_LNK, slots // store.page_size, axis=-1)
        page, cell = np.asarray(pages)[unit // store.units], unit % store.units
        first = (cell // store.heads * store.pages + page) * store.page_size
        rows = (first + slots % store.page_size) * store.heads + cell % store.heads
        return torch.from_numpy(rows.astype(np.int32)).to(store.device)
