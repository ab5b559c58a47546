"""What all workers are doing and have done, those that died included."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace

from moesaic.serve.cluster.fleet import Fleet
from moesaic.serve.cluster.questions import Questions
from moesaic.serve.cluster.worker import WorkerHandle
from moesaic.serve.core.engine_loop import EngineFailed
from moesaic.serve.core.stats import EngineStats

STATS_SECONDS = 1.0  # between two reads of a worker's stats


class FleetStats:
    def __init__(self, fleet: Fleet, questions: Questions) -> None:
        self._fleet, self._questions = fleet, questions
        self._dead = EngineStats()  # of lives that are over

    def total(self) -> EngineStats:
        """As last read."""
        return sum((worker.stats for worker in self._fleet.handles), self._dead)

    async def read(self) -> None:
        """One that dies is counted as it last was."""

        async def read(worker: WorkerHandle) -> None:
            with contextlib.suppress(EngineFailed):
                worker.stats = await self._questions.ask(worker, "stats")
                worker.rank_stats = await self._questions.ask(worker, "ranks")

        await asyncio.gather(*(read(worker) for worker in self._fleet.handles if worker.ready is not None))

    async def poll(self) -> None:
        while True:
            await asyncio.sleep(STATS_SECONDS)
            await self.read()

    def life_over(self, worker: WorkerHandle) -> None:
        """Counters never go back, but its pages and its requests are gone."""
        self._dead += replace(worker.stats, pages=0, pages_in_use=0, running=0, waiting=0)
        worker.stats, worker.rank_stats = EngineStats(), []
