"""Put a model to sleep, so that its memory is free for something else, and wake it again.

    sleep = Sleep(client)
    await sleep.begin(1, "wait")        its workers have ended: no weights, no KV cache, no context on a GPU
    await sleep.wake({"weights", "kv_cache"})

The front stays: it knows the model's names and adapters, and workers are started again as they were. At level 1 the
files of the weights are kept in host memory (mapped, so that the system has them at hand) and are read from there; at
level 2 from disk. A process that has ended holds nothing, which could not be said of one that has only tidied up.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, get_args

from moesaic.errors import UserError
from moesaic.serve.cluster.client import EngineClient
from moesaic.serve.cluster.worker import State, WorkerHandle
from moesaic.serve.core.engine_loop import WorkerDied

Mode = Literal["wait", "abort", "keep"]  # what becomes of open requests: they finish, fail, or go on after waking
MODES: tuple[str, ...] = get_args(Mode)
PARTS = frozenset({"weights", "kv_cache"})  # that can be woken one after the other
WEIGHTS = {".safetensors", ".gguf"}


class Sleep:
    """`level` 0 is awake. Everything runs on the event loop, one change at a time."""

    def __init__(self, client: EngineClient, wait_seconds: float = 60.0) -> None:
        self.client = client
        self.wait_seconds = wait_seconds
        self.level = 0
        self.asleep: frozenset[str] = frozenset()  # parts that nobody has woken
        self._workers: list[WorkerHandle] = []
        self._files: list[mmap.mmap] = []
        self._changing = asyncio.Lock()

    async def begin(self, level: int, mode: str = "wait") -> None:
        """Returns when the memory is free. The caller sees to it that no new request is submitted."""
        async with self._changing:
            if self.level:
                return
            self.level, self.asleep = level, PARTS
            if mode == "wait":
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self.wait_seconds):
                        await self.client.until_idle()
            if mode != "keep":
                self.client.give_up(WorkerDied("the model was put to sleep"))
            self._workers = [worker for worker in self.client.workers if not worker.leaving]
            for worker in self._workers:
                if worker.state is State.READY:
                    worker.state = State.DRAINING  # so that no request comes back to it
            for worker in self._workers:
                self.client.move(list(worker.open.values()))
            if level == 1:
                folders = {worker.options.directory for worker in self._workers}
                self._files = await asyncio.to_thread(lambda: [one for folder in folders for one in held(folder)])
            await asyncio.gather(*(self._end(worker) for worker in self._workers))

    async def _end(self, worker: WorkerHandle) -> None:
        await self.client.fleet.stop(worker)
        self.client.worker_stats.life_over(worker)
        self.client.count_slots()

    async def wake(self, parts: frozenset[str] = PARTS) -> None:
        """When all parts have been asked for, workers start; returns when they are ready."""
        async with self._changing:
            self.asleep -= parts
            if not self.level or self.asleep:
                return
            fleet = self.client.fleet
            for worker in self._workers:
                if worker.state is State.ENDED:
                    fleet.restart(worker, worker.options, worker.weights)
            try:
                for worker in self._workers:
                    await fleet.until(lambda: worker.state is State.READY or worker.failed_starts > 0)  # noqa: B023
                    if worker.failed_starts:
                        problem = f"cannot be started ({worker.problem})"
                        raise UserError(f"worker {worker.number}", problem, "Free memory, and wake it again.")
            finally:
                for file in self._files:
                    file.close()
                self._files = []
            self.level = 0


def held(directory: Path) -> Iterator[mmap.mmap]:
    """The files of a model's weights, mapped into memory; the system is asked to have them there."""
    files = [directory] if directory.is_file() else sorted(directory.iterdir())
    for path in files:
        if path.suffix in WEIGHTS and path.stat().st_size:
            with path.open("rb") as file:
                found = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            if hasattr(mmap, "MADV_WILLNEED"):
                found.madvise(mmap.MADV_WILLNEED)
            yield found
