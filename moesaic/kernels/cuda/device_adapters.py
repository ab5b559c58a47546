"""LoRA adapters on the device, side by side, so that graphed steps of requests with different ones are one step.

A slot (a sequence's place in the device's tables) has the number of an adapter, 0 for none; graphs read both tables.
They have room to spare: an adapter that needs more moves them, and then graphs that read them are wrong.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from moesaic.kernels.triton.low_rank import MAX_RANK, LowRank


class LoadedAdapter(Protocol):
    """`corrections`: by site, the down (r, I) and up (O, r) matrices."""

    @property
    def corrections(self) -> Mapping[str, tuple[Tensor, Tensor]]: ...


class DeviceAdapters:
    def __init__(self, slots: int, sites: Collection[str], device: torch.device) -> None:
        self.sites = frozenset(sites)
        self.adapters_S = torch.zeros(slots, dtype=torch.int32, device=device)
        self.known_S = np.zeros(slots, np.int32)  # the same, as the host knows it
        self.matrices: dict[str, LowRank] = {}
        self.numbers: dict[LoadedAdapter, int] = {}
        self.capacity = 0  # numbers up to this one
        self.moves = 0  # how often the tables moved

    def takes(self, adapter: LoadedAdapter) -> bool:
        """Whether it corrects nothing but what graphed steps add corrections to."""
        ranks = [len(down_RI) for down_RI, _ in adapter.corrections.values()]
        return adapter.corrections.keys() <= self.sites and max(ranks, default=0) <= MAX_RANK

    def assign(self, slot: int, adapter: LoadedAdapter | None, in_use: Collection[LoadedAdapter]) -> None:
        """Give a slot its adapter; `in_use` are those whose matrices must stay."""
        number = 0 if adapter is None else self._number(adapter, in_use)
        if self.known_S[slot] != number:
            self.known_S[slot] = number
            self.adapters_S[slot] = number  # in the stream, after the steps that read the one before

    def _number(self, adapter: LoadedAdapter, in_use: Collection[LoadedAdapter]) -> int:
        number = self.numbers.get(adapter)
        if number is None:
            self.numbers = {one: old for one, old in self.numbers.items() if one in in_use}
            free = set(range(1, self.capacity + 1)) - set(self.numbers.values())
            number = min(free, default=self.capacity + 1)
            self.numbers[adapter] = number
            self._make_room(adapter)
            self._write(adapter, number)
        return number

    def _make_room(self, adapter: LoadedAdapter) -> None:
        """Moves the tables where the adapter does not fit in."""
        fits = len(self.numbers) <= self.capacity and all(
            site in self.matrices and len(down_RI) <= self.matrices[site].rank
            for site, (down_RI, _) in adapter.corrections.items()
        )
        if fits:
            return
        while self.capacity < len(self.numbers):
            self.capacity = max(4, 2 * self.capacity)
        sites = {site: matrices for one in self.numbers for site, matrices in one.corrections.items()}
        for site, (down_RI, up_OR) in sites.items():
            rank = max(len(one.corrections[site][0]) for one in self.numbers if site in one.corrections)
            self.matrices[site] = LowRank.empty(self.capacity, rank, down_RI, up_OR)
        self.moves += 1
        for one, number in self.numbers.items():
            if one is not adapter:
                self._write(one, number)

    def _write(self, adapter: LoadedAdapter, number: int) -> None:
        for site, matrices in self.matrices.items():
            matrices.write(number, adapter.corrections.get(site))
