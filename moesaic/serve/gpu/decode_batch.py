"""Requests that go on by themselves: each step one token, chosen on the device, whatever it was.

Where they stand is known without knowing their tokens, so the next step's inputs are arrays to which one is added. As
far as the rest of the engine is concerned a member is where the host last saw it, and busy.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from moesaic.serve.core.page_pool import PagePool
from moesaic.serve.core.request import Request, Sampling
from moesaic.serve.core.sampler import draw
from moesaic.serve.gpu.inputs import CohortRows


@dataclass(eq=False)
class Seat:
    """A request's slot on the device, as long as it keeps the pages it sat down with."""

    slot: int
    request: Request
    pages: list[int]
    simple: bool  # whether the device chooses its tokens
    member: bool = False  # of the cohort
    changed: bool = False  # whether it may have pages the device does not know
    fixed: int = 0  # pages that are shared, and will not change any more
    sent: tuple[int, ...] = ()  # the pages after those, as the device knows them

    @property
    def taken(self) -> bool:
        return self.request.pages is self.pages

    def new_pages(self) -> dict[tuple[int, int], int]:
        """What the device does not know yet: (slot, number) -> page. A page may change until it is shared."""
        self.changed = False
        current = tuple(self.pages[self.fixed :])
        if current == self.sent:
            return {}
        known = dict(enumerate(self.sent))
        new = {
            (self.slot, self.fixed + number): page for number, page in enumerate(current) if known.get(number) != page
        }
        shared = len(self.request.nodes)
        self.sent = current[shared - self.fixed :]
        self.fixed = shared
        return new


def chosen_on_device(sampling: Sampling) -> bool:
    """Whether a request wants the likeliest token, or one drawn from the whole distribution, and nothing else."""
    whole = not sampling.top_k and sampling.top_p >= 1.0 and sampling.min_p <= 0.0
    return whole and not sampling.logprobs and replace(sampling, temperature=0.0).plain


class Seats:
    """Who sits where. A seat whose request has lost its pages, or ended, is given away when one is wanted."""

    def __init__(self, most: int) -> None:
        self.by_number: dict[int, Seat] = {}
        self.free = list(range(most - 1, -1, -1))

    def of(self, request: Request) -> Seat:
        seat = self.by_number.get(request.number)
        if seat is not None and seat.taken:
            return seat
        if seat is None and not self.free:
            for number in [number for number, old in self.by_number.items() if not old.taken]:
                self.free.append(self.by_number.pop(number).slot)
        slot = seat.slot if seat is not None else self.free.pop()
        seat = Seat(slot, request, request.pages, chosen_on_device(request.sampling))
        self.by_number[request.number] = seat
        return seat


class Cohort:
    def __init__(self, page_pool: PagePool) -> None:
        self.page_pool = page_pool
        self.clear()

    def clear(self) -> None:
        for seat in getattr(self, "seats", ()):
            seat.member = False
        self.seats: list[Seat] = []
        self.slots, self.places, self.ends = (np.zeros(0, np.int32) for _ in range(3))
        self.temperatures = np.zeros(0, np.float32)
        self.draws = np.zeros(0, np.float64)

    def join(self, seat: Seat, place: int) -> None:
        """`place` is where its next token will stand, which is being chosen now."""
        seat.member = True
        self.seats.append(seat)
        sampling = seat.request.sampling
        self.slots = np.append(self.slots, np.int32(seat.slot))
        self.places = np.append(self.places, np.int32(place))
        self.ends = np.append(self.ends, np.int32(seat.request.limit - 1))
        self.temperatures = np.append(self.temperatures, np.float32(sampling.temperature))
        self.draws = np.append(self.draws, 0.0)

    def drop_ended(self) -> None:
        """Those that have ended, or lost their pages, or will have all their tokens when what is queued has run."""
        kept_S = self.places < self.ends
        for row, seat in enumerate(self.seats):
            if seat.request.finish_reason is not None or seat.request.pages is not seat.pages:
                kept_S[row] = False
        if kept_S.all():
            return
        for seat, kept in zip(self.seats, kept_S, strict=True):
            seat.member = bool(kept)
        self.seats = [seat for seat in self.seats if seat.member]
        self.slots, self.places, self.ends = self.slots[kept_S], self.places[kept_S], self.ends[kept_S]
        self.temperatures, self.draws = self.temperatures[kept_S], self.draws[kept_S]

    def grow(self) -> bool:
        """A page for everyone who begins a new one with the next token; False where there are too few."""
        for row in np.flatnonzero(self.places % self.page_pool.size == 0):
            seat = self.seats[row]
            seat.changed = True
            if not self.page_pool.grow(seat.request, int(self.places[row]) + 1):
                return False
        return True

    def rows(self) -> CohortRows:
        for row in np.flatnonzero(self.temperatures > 0):
            self.draws[row] = draw(self.seats[row].request.seed, int(self.places[row]) + 1)
        return CohortRows(self.slots, self.places, self.temperatures, self.draws)

    def advance(self) -> None:
        self.places = self.places + 1
