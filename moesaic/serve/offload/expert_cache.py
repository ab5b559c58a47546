"""Which experts lie in which of a few slots, and which of them makes room for another: the one with the least load.

An expert's load is how often it was wanted, each time counting half as much HALF_LIFE forwards later. It is kept for
experts that are not in a slot too: one that was hot for long stays when it comes back. Nothing here knows tensors.
"""

from __future__ import annotations

from math import log2

Key = tuple[int, int]  # a layer and an expert
HALF_LIFE = 64.0  # forwards


class ExpertCache:
    """Pinned slots keep what they hold; who pins must unpin."""

    def __init__(self, slots: int, half_life: float = HALF_LIFE) -> None:
        assert slots > 0
        self.slots, self.half_life = slots, half_life
        self.keys: list[Key | None] = [None] * slots
        self.pins = [0] * slots
        self._where: dict[Key, int] = {}
        # The logarithm of the load as it would count at forward 0: so loads of different times compare as they are.
        self._load: dict[Key, float] = {}
        self._now = 0.0

    def slot(self, key: Key) -> int | None:
        return self._where.get(key)

    def load(self, key: Key) -> float:
        return self._load.get(key, float("-inf"))

    def tick(self) -> None:
        """A forward has come to the experts of this cache."""
        self._now += 1 / self.half_life

    def want(self, key: Key) -> None:
        """Count it as wanted now."""
        old = self._load.get(key)
        self._load[key] = self._now if old is None else self._now + log2(1 + 2 ** (old - self._now))

    def pin(self, slot: int) -> None:
        self.pins[slot] += 1

    def unpin(self, slot: int) -> None:
        assert self.pins[slot] > 0
        self.pins[slot] -= 1

    def place(self, key: Key) -> int | None:
        """Give it a slot: a free one, else that of the expert with the least load. None where all are pinned."""
        assert key not in self._where
        best, least = None, float("inf")
        for slot, held in enumerate(self.keys):
            if held is None:
                best = slot
                break
            if not self.pins[slot] and (load := self.load(held)) < least:
                best, least = slot, load
        if best is None:
            return None
        if (held := self.keys[best]) is not None:
            del self._where[held]
        self.keys[best], self._where[key] = key, best
        return best

    def forget(self, key: Key) -> None:
        """Its slot is free, whoever has pinned it: what it should have held has not come."""
        slot = self._where.pop(key)
        self.keys[slot], self.pins[slot] = None, 0

    @property
    def available(self) -> int:
        """Slots that are free or could be made free."""
        return self.pins.count(0)
