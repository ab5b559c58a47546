"""Routing for workers whose clocks follow their load: `moesaic serve DIR --replicas N --frequency auto`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from moesaic.serve.cluster.routing import PrefixRouting, Visit
from moesaic.serve.cluster.worker import WorkerHandle
from moesaic.serve.energy.routing import Headroom, route

if TYPE_CHECKING:
    from moesaic.serve.cluster.client import OpenRequest


class FrequencyRouting(PrefixRouting):
    """To where a request lifts no clock (`energy/routing.py`): among those workers, as prefixes say; where there are
    none, to the worker whose clock is lowest. What workers say of their room is as old as their stats, so that the
    requests sent since count against it."""

    def choose(self, entry: OpenRequest, workers: Sequence[WorkerHandle]) -> Visit | None:
        if len(workers) < 2 or not all(worker.stats.clock_mhz for worker in workers):
            return super().choose(entry, workers)
        rooms = [_room(worker) for worker in workers]
        same = [worker for worker, room in zip(workers, rooms, strict=True) if room.same_clock > 0]
        if any(worker.open for worker in same):  # the others may stay at their idle clock
            same = [worker for worker in same if worker.open]
        if not same:
            same = [workers[route(rooms, [len(worker.open) for worker in workers])]]
        return super().choose(entry, same)


def _room(worker: WorkerHandle) -> Headroom:
    stats = worker.stats
    since = max(0, len(worker.open) - stats.running - stats.waiting)
    return Headroom(stats.clock_mhz, stats.room_same_clock - since, stats.room_in_time - since)
