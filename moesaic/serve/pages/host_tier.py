"""Pages in host memory: as many as fit in so many bytes, the least recently used go first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import torch
from torch import Tensor


class HostTier:
    """One block of memory, pinned where the cache is on a GPU, in slots of a page. `on_evict` is given what must go,
    before its slot is used again."""

    def __init__(
        self, max_bytes: int, page_bytes: int, pinned: bool, on_evict: Callable[[bytes, Tensor], None] | None = None
    ) -> None:
        self.slots = max_bytes // page_bytes
        self.memory = torch.empty(self.slots, page_bytes, dtype=torch.uint8, pin_memory=pinned)
        self.free = list(range(self.slots - 1, -1, -1))
        self.places: OrderedDict[bytes, int] = OrderedDict()
        self.on_evict = on_evict

    @property
    def used_bytes(self) -> int:
        return len(self.places) * self.memory.shape[1]

    def __contains__(self, name: bytes) -> bool:
        return name in self.places

    def new(self, name: bytes) -> Tensor | None:
        """Where to write a page; None where it is already, or none fits."""
        if name in self.places:
            self.places.move_to_end(name)
            return None
        if not self.slots:
            return None
        if not self.free:
            oldest, slot = self.places.popitem(last=False)
            if self.on_evict is not None:
                self.on_evict(oldest, self.memory[slot])
            self.free.append(slot)
        self.places[name] = self.free.pop()
        return self.memory[self.places[name]]

    def get(self, name: bytes) -> Tensor | None:
        """Its memory: good until the next page comes in."""
        if (slot := self.places.get(name)) is None:
            return None
        self.places.move_to_end(name)
        return self.memory[slot]

    def items(self) -> list[tuple[bytes, Tensor]]:
        """The least recently used first."""
        return [(name, self.memory[slot]) for name, slot in self.places.items()]
