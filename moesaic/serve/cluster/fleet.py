"""The workers of a server, whatever becomes of them: started, heard, restarted when they die.

A worker is dead when one of its ranks has ended, or has been silent for longer than `stall_seconds`: every rank is
pinged, so one that was stopped is found, also where it has nothing to do. All its ranks are killed then, what it had is
given back to the listener at once, and it is started again, at first without delay, then after ever longer ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from moesaic.serve.cluster.messages import EngineOptions, Failed, FromEngine, Ping, Pong, Ready
from moesaic.serve.cluster.prefix_routing import PrefixIndex
from moesaic.serve.cluster.worker import StartWorker, State, Worker, WorkerHandle

logger = logging.getLogger("moesaic.serve")

START_SECONDS = 180.0  # until a new process says its first word: before, it imports
HUNG_SECONDS = 900.0  # a step that takes longer will not end
STEADY_SECONDS = 10.0  # of life, or one request, after which a death is not the last one's fault
RESTART_SECONDS = 1.0  # before a worker that died again is restarted; doubled while it keeps dying
MAX_RESTART_SECONDS = 60.0
HOPELESS = 3  # starts that fail one after the other, before nobody waits for them any more


class FleetListener(Protocol):
    """All on the event loop."""

    def worker_ready(self, handle: WorkerHandle) -> None: ...

    def worker_said(self, handle: WorkerHandle, message: FromEngine) -> None: ...

    def worker_died(self, handle: WorkerHandle) -> None: ...

    def no_worker_starts(self, problem: str) -> None: ...


class Fleet:
    """Everything runs on the event loop."""

    def __init__(self, start_worker: StartWorker, listener: FleetListener) -> None:
        self.handles: list[WorkerHandle] = []
        self.deaths = 0
        self.start_worker = start_worker
        self._listener = listener
        self._tasks: dict[WorkerHandle, asyncio.Task[None]] = {}
        self._numbers = 0
        self._changed = asyncio.Event()
        self._ended = False

    def open(self) -> None:
        self._events = asyncio.get_running_loop()
        self._watching = asyncio.create_task(self._watch())

    async def close(self) -> None:
        self._ended = True
        tasks = [self._watching, *self._tasks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(self._end(handle) for handle in self.handles))

    def adopt(self, options: EngineOptions, worker: Worker, ready: Ready) -> WorkerHandle:
        """A worker that was started elsewhere, and is ready."""
        handle = self._new(options, 0)
        self._hear(handle, worker)
        self._take(handle, worker, ready)
        return handle

    def add(self, options: EngineOptions, weights: int) -> WorkerHandle:
        """A new one, which begins to start."""
        handle = self._new(options, weights)
        self._run(handle, self._start(handle))
        return handle

    def restart(self, handle: WorkerHandle, options: EngineOptions, weights: int) -> None:
        """One that was stopped, with other options."""
        assert handle.state is State.ENDED
        handle.options, handle.weights, handle.leaving = options, weights, False
        handle.failures = handle.failed_starts = 0
        handle.ready = None  # of its last life: until it says so again, nothing may be asked of it
        self.handles.append(handle)
        self.handles.sort(key=lambda one: one.number)
        self._run(handle, self._start(handle))

    async def stop(self, handle: WorkerHandle) -> None:
        """For good, whatever it still has."""
        if (task := self._tasks.pop(handle, None)) is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        self.handles.remove(handle)
        self._forget(handle)
        await self._end(handle)
        self.notify()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Return when something is true that a change of a worker's state may make so."""
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    def _new(self, options: EngineOptions, weights: int) -> WorkerHandle:
        handle = WorkerHandle(self._numbers, options, weights)
        self._numbers += 1
        self.handles.append(handle)
        return handle

    async def _end(self, handle: WorkerHandle) -> None:
        worker, handle.worker, handle.state = handle.worker, None, State.ENDED
        if worker is not None:
            await asyncio.to_thread(worker.end)

    def _run(self, handle: WorkerHandle, work: Coroutine[Any, Any, None]) -> None:
        self._tasks[handle] = task = asyncio.create_task(work)
        task.add_done_callback(lambda done: self._tasks.pop(handle, None) if self._tasks.get(handle) is done else None)

    def notify(self) -> None:
        """A worker's state has changed, or what it has to do."""
        self._changed.set()

    # Life

    async def _start(self, handle: WorkerHandle) -> None:
        handle.state = State.STARTING
        starting = asyncio.create_task(asyncio.to_thread(self.start_worker, handle.options))
        try:
            worker = await asyncio.shield(starting)
        except asyncio.CancelledError:
            with contextlib.suppress(Exception):
                await asyncio.to_thread((await starting).kill)
            raise
        except Exception as error:
            handle.problem = str(error)
            self._died(handle)
            return
        self._hear(handle, worker)

    def _hear(self, handle: WorkerHandle, worker: Worker) -> None:
        handle.worker = worker
        handle.silence, handle.heard, handle.busy, handle.steps = {}, set(), 0.0, 0
        handle.served = False

        def post(message: FromEngine | None) -> None:
            with contextlib.suppress(RuntimeError):  # the event loop has ended
                self._events.call_soon_threadsafe(self._take, handle, worker, message)

        worker.listen(post)

    def _take(self, handle: WorkerHandle, worker: Worker, message: FromEngine | None) -> None:
        if handle.worker is not worker or self._ended:
            return  # of an earlier life
        if message is None:
            self._died(handle)
            return
        rank = message.rank if isinstance(message, Pong) else 0
        handle.silence[rank] = 0.0
        handle.heard.add(rank)
        if isinstance(message, Pong):
            if rank == 0 and (not message.working or message.steps != handle.steps):
                handle.busy, handle.steps = 0.0, message.steps
        elif isinstance(message, Ready):
            handle.ready, handle.ready_since, handle.problem = message, time.monotonic(), ""
            handle.failed_starts = 0
            handle.state = State.DRAINING if handle.leaving else State.READY
            self._listener.worker_ready(handle)
            self.notify()
        elif isinstance(message, Failed):
            handle.problem = str(message.problem)
        else:
            self._listener.worker_said(handle, message)

    async def _watch(self) -> None:
        """Only time in which this event loop ran is counted as silence: had it stood still, all would seem silent."""
        last = time.monotonic()
        while True:
            every = max(0.05, min([1.0, *(handle.options.stall_seconds / 4 for handle in self.handles)]))
            await asyncio.sleep(every)
            now = time.monotonic()
            passed, last = min(now - last, 2 * every), now
            for handle in list(self.handles):
                if handle.worker is not None and (problem := self._silent(handle, handle.worker.ranks, passed)):
                    handle.problem = problem
                    self._died(handle)
                handle.send(Ping())

    def _silent(self, handle: WorkerHandle, ranks: int, passed: float) -> str:
        handle.busy += passed
        if handle.busy > HUNG_SECONDS:
            return f"a step has taken {handle.busy:.0f} s"
        for rank in range(ranks):
            silence = handle.silence[rank] = handle.silence.get(rank, 0.0) + passed
            if silence > (handle.options.stall_seconds if rank in handle.heard else START_SECONDS):
                return f"rank {rank} has been silent for {silence:.1f} s"
        return ""

    def _died(self, handle: WorkerHandle) -> None:
        worker, handle.worker = handle.worker, None
        handle.state = State.DEAD
        handle.deaths += 1
        handle.failed_starts += handle.ready is None
        steady = time.monotonic() - handle.ready_since > STEADY_SECONDS
        lived = handle.ready is not None and (steady or handle.served)
        handle.failures = 1 if lived else handle.failures + 1
        handle.ready = None
        self.deaths += 1
        self._forget(handle)
        self._run(handle, self._bury(handle, worker))
        self._listener.worker_died(handle)
        if all(other.failed_starts >= HOPELESS for other in self.handles):
            self._listener.no_worker_starts(handle.problem)
        self.notify()

    def _forget(self, handle: WorkerHandle) -> None:
        handle.prefixes = PrefixIndex()
        handle.adapters.clear()

    async def _bury(self, handle: WorkerHandle, worker: Worker | None) -> None:
        if worker is not None:
            how = handle.problem or await asyncio.to_thread(worker.why)
            logger.error("worker %d died (%s); restarting it", handle.number, how)
            await asyncio.shield(asyncio.to_thread(worker.kill))
        else:
            logger.error("worker %d cannot be started (%s)", handle.number, handle.problem)
        if handle.failures > 1:
            await asyncio.sleep(min(MAX_RESTART_SECONDS, RESTART_SECONDS * 2 ** (handle.failures - 2)))
        await self._start(handle)
