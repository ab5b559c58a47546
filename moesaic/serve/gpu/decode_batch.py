"""The decode batch: requests whose every step is one token, sampled on the device, whatever the last one was.

Their positions are known without their tokens, so the next step's inputs are arrays to which one is added. As far as
the rest of the engine is concerned a request of the batch is where the host last saw it, and busy.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moesaic.kernels.cuda.step_inputs import DecodeRows
from moesaic.serve.core.draws import draw
from moesaic.serve.core.page_pool import PagePool
from moesaic.serve.core.request import Request
from moesaic.serve.core.sampling import Sampling


@dataclass(eq=False)
class Slot:
    """A request's place in the device's tables, as long as it keeps the pages with which it was given one."""

    index: int
    request: Request
    pages: list[int]
    on_device: bool  # whether its tokens are sampled there
    in_batch: bool = False  # the decode batch
    changed: bool = False  # whether it may have pages the device does not know
    published: int = 0  # pages that are shared, and will not change any more
    sent: tuple[int, ...] = ()  # the pages after those, as the device knows them

    @property
    def taken(self) -> bool:
        return self.request.pages is self.pages

    def new_pages(self) -> dict[tuple[int, int], int]:
        """What the device does not know yet: (slot, number) -> page. A page may change until it is shared."""
        self.changed = False
        current = tuple(self.pages[self.published :])
        if current == self.sent:
            return {}
        known = dict(enumerate(self.sent))
        new = {
            (self.index, self.published + number): page
            for number, page in enumerate(current)
            if known.get(number) != page
        }
        shared = len(self.request.nodes)
        self.sent = current[shared - self.published :]
        self.published = shared
        return new


def samples_on_device(sampling: Sampling) -> bool:
    """Whether sampling is greedy, or from the whole distribution at a temperature, and nothing else."""
    reported = sampling.logprobs or sampling.logprob_tokens
    return sampling.whole and not sampling.changes_logits and not reported


class Slots:
    """Which request has which slot. That of one that was preempted, or has finished, is reused when none is free."""

    def __init__(self, count: int) -> None:
        self.by_number: dict[int, Slot] = {}
        self.free = list(range(count - 1, -1, -1))

    def of(self, request: Request) -> Slot:
        slot = self.by_number.get(request.number)
        if slot is not None and slot.taken:
            return slot
        if slot is None and not self.free:
            for number in [number for number, old in self.by_number.items() if not old.taken]:
                self.free.append(self.by_number.pop(number).index)
        index = slot.index if slot is not None else self.free.pop()
        slot = Slot(index, request, request.pages, samples_on_device(request.sampling))
        self.by_number[request.number] = slot
        return slot


class DecodeBatch:
    def __init__(self, page_pool: PagePool) -> None:
        self.page_pool = page_pool
        self.slots: list[Slot] = []
        self.clear()

    def clear(self) -> None:
        for slot in self.slots:
            slot.in_batch = False
        self.slots = []
        self.indices_S, self.positions_S, self.ends_S = (np.zeros(0, np.int32) for _ in range(3))
        self.temperatures_S = np.zeros(0, np.float32)
        self.draws_S = np.zeros(0, np.float64)

    def join(self, slot: Slot, position: int) -> None:
        """`position` is that of its next token, which is being sampled now."""
        slot.in_batch = True
        self.slots.append(slot)
        self.indices_S = np.append(self.indices_S, np.int32(slot.index))
        self.positions_S = np.append(self.positions_S, np.int32(position))
        self.ends_S = np.append(self.ends_S, np.int32(slot.request.limit - 1))
        self.temperatures_S = np.append(self.temperatures_S, np.float32(slot.request.sampling.temperature))
        self.draws_S = np.append(self.draws_S, 0.0)

    def drop_finished(self) -> None:
        """Those that have finished, or were preempted, or will have all their tokens when what is in flight has run."""
        kept_S = self.positions_S < self.ends_S
        for row, slot in enumerate(self.slots):
            if slot.request.finish_reason is not None or slot.request.pages is not slot.pages:
                kept_S[row] = False
        if kept_S.all():
            return
        for slot, kept in zip(self.slots, kept_S, strict=True):
            slot.in_batch = bool(kept)
        self.slots = [slot for slot in self.slots if slot.in_batch]
        self.indices_S, self.positions_S, self.ends_S = (
            array_S[kept_S] for array_S in (self.indices_S, self.positions_S, self.ends_S)
        )
        self.temperatures_S, self.draws_S = self.temperatures_S[kept_S], self.draws_S[kept_S]

    def grow(self) -> bool:
        """A page for every request whose next token is the first of one; False where there are too few."""
        for row in np.flatnonzero(self.positions_S % self.page_pool.size == 0):
            slot = self.slots[row]
            slot.changed = True
            if not self.page_pool.grow(slot.request, int(self.positions_S[row]) + 1):
                return False
        return True

    def rows(self) -> DecodeRows:
        for row in np.flatnonzero(self.temperatures_S > 0):
            self.draws_S[row] = draw(self.slots[row].request.seed, int(self.positions_S[row]) + 1)
        return DecodeRows(self.indices_S, self.positions_S, self.temperatures_S, self.draws_S)

    def advance(self) -> None:
        self.positions_S = self.positions_S + 1
