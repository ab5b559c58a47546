"""Changes of a server while it serves: more workers or fewer, one taken out, new weights. No request is dropped.

    life = LifeCycle(client)
    life.begin("scale to 3", life.scale(3))     one change at a time, in the background; `life.change` says how it goes

A worker that is to go drains: it is given nothing new and ends when it has nothing left. What is still open after
`drain_seconds` goes on at another worker with the same weights, where there is one. A request keeps the weights it
began with.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moesaic.errors import UserError
from moesaic.model.formats.matching import match
from moesaic.model.formats.opening import open_checkpoint
from moesaic.model.tokenizer import Tokenizer
from moesaic.serve.cluster.client import EngineClient
from moesaic.serve.cluster.messages import EngineOptions
from moesaic.serve.cluster.worker import State, WorkerHandle

logger = logging.getLogger("moesaic.serve")


@dataclass
class Change:
    what: str
    state: str = "running"  # done, failed
    problem: str = ""


class Busy(UserError):
    """Another change is under way."""


class LifeCycle:
    def __init__(self, client: EngineClient, drain_seconds: float = 60.0) -> None:
        self.client = client
        self.drain_seconds = drain_seconds
        self.change: Change | None = None
        self._task: asyncio.Task[None] | None = None

    def begin(self, what: str, work: Coroutine[Any, Any, None]) -> Change:
        if self.change is not None and self.change.state == "running":
            work.close()
            raise Busy("", f"another change is under way ({self.change.what})", "Wait until it is done.")
        self.change = change = Change(what)
        self._task = asyncio.create_task(self._follow(change, work))
        return change

    async def _follow(self, change: Change, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
            change.state = "done"
        except Exception as error:
            change.state, change.problem = "failed", str(error)
            logger.error("%s failed: %s", change.what, error)

    # Changes

    async def scale(self, count: int, role: str = "") -> None:
        """So many workers of a role."""
        if count < 1:
            raise UserError("workers", f"must be at least 1, not {count}")
        here = self._of(role)
        if not here:
            raise UserError("role", f'there is no worker of role "{role}"')
        if count > len(here):
            newest = max(here, key=lambda worker: worker.weights)
            new = [self.client.fleet.add(newest.options, newest.weights) for _ in range(count - len(here))]
            await self._all_ready(new)
        else:
            last = sorted(here, key=lambda worker: (worker.state is State.READY, len(worker.open), -worker.number))
            await asyncio.gather(*(self._take_out(worker) for worker in last[: len(here) - count]))

    async def remove(self, number: int) -> None:
        """One worker by its number; its role keeps another."""
        worker = next((one for one in self.client.workers if one.number == number and not one.leaving), None)
        if worker is None:
            raise UserError("worker", f"there is no worker {number}")
        if len(self._of(worker.options.role)) == 1:
            raise UserError("worker", f"{number} is the last one", "Start another before.")
        await self._take_out(worker)

    async def update_weights(self, directory: Path) -> None:
        """Worker by worker. Where there is one, its successor is started before it goes if there is room for both; else
        new requests wait."""
        await asyncio.to_thread(self.check_weights, directory)
        self.client.weights += 1
        weights = self.client.weights
        for worker in [one for one in self.client.workers if not one.leaving]:
            options = replace(worker.options, directory=directory)
            others = [one for one in self._of(worker.options.role) if one is not worker and one.state is State.READY]
            if not others and self._room(worker):
                await self._all_ready([self.client.fleet.add(options, weights)])
                await self._take_out(worker)
            else:
                await self._replace(worker, options, weights)

    async def _replace(self, worker: WorkerHandle, options: EngineOptions, weights: int) -> None:
        fleet, before = self.client.fleet, (worker.options, worker.weights)
        await self._take_out(worker)
        fleet.restart(worker, options, weights)
        try:
            await self._started(worker)
        except UserError:
            await self._end(worker)
            fleet.restart(worker, *before)
            await self._started(worker)
            raise

    def check_weights(self, directory: Path) -> None:
        """What the front told clients must stay true: the same model and tokenizer, in whatever precision."""
        source, engine = open_checkpoint(directory), self.client.engine
        if match(source)[0] != engine.model.config:
            raise UserError(directory, "is another model than the one that is served", "Start a server of its own.")
        tokenizer = Tokenizer.from_files(source.files, source.place)
        texts = [one.fast.to_str() if one is not None else "" for one in (tokenizer, engine.tokenizer)]
        if texts[0] != texts[1]:
            raise UserError(directory, "has another tokenizer than the model that is served")

    # Steps of them

    def _of(self, role: str) -> list[WorkerHandle]:
        return [worker for worker in self.client.workers if worker.options.role == role and not worker.leaving]

    def _room(self, worker: WorkerHandle) -> bool:
        return worker.ready is not None and self.client.fleet.start_worker.room(worker.options, worker.ready)

    async def _take_out(self, worker: WorkerHandle) -> None:
        worker.leaving = True
        if worker.state is State.READY:
            worker.state = State.DRAINING
        self.client.count_slots()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.drain_seconds):
                await self.client.fleet.until(lambda: not self.client.needs(worker))
        if self.client.needs(worker):
            same = [one for one in self.client.workers if one.weights == worker.weights and one.state is State.READY]
            if same:
                self.client.move(list(worker.open.values()))
            await self.client.fleet.until(lambda: not self.client.needs(worker))
        await self._end(worker)

    async def _end(self, worker: WorkerHandle) -> None:
        await self.client.fleet.stop(worker)
        self.client.worker_stats.life_over(worker)
        self.client.count_slots()

    async def _all_ready(self, new: list[WorkerHandle]) -> None:
        """All of them, or none."""
        try:
            for worker in new:
                await self._started(worker)
        except UserError:
            await asyncio.gather(*(self._end(worker) for worker in new))
            raise

    async def _started(self, worker: WorkerHandle) -> None:
        await self.client.fleet.until(lambda: worker.state is State.READY or worker.failed_starts > 0)
        if worker.failed_starts:
            raise UserError(f"worker {worker.number}", f"cannot be started ({worker.problem})")
