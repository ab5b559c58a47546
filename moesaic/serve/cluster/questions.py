"""Questions to workers and their answers: calls of `EngineServer`'s methods."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

from moesaic.serve.cluster.messages import Ask, Reply
from moesaic.serve.cluster.worker import WorkerHandle
from moesaic.serve.core.engine_loop import WorkerDied


class Questions:
    def __init__(self, numbers: Iterator[int]) -> None:
        self._numbers = numbers
        self._open: dict[int, tuple[WorkerHandle, asyncio.Future[Any]]] = {}

    async def ask(self, worker: WorkerHandle, method: str, *arguments: Any) -> Any:
        number = next(self._numbers)
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._open[number] = worker, done
        worker.send(Ask(number, method, arguments))
        try:
            return await done
        finally:
            self._open.pop(number, None)

    def tell(self, worker: WorkerHandle, method: str, *arguments: Any) -> None:
        """Without waiting for what comes of it."""
        worker.send(Ask(next(self._numbers), method, arguments))

    def answer(self, reply: Reply) -> None:
        _, done = self._open.get(reply.ask, (None, None))
        if done is None or done.done():
            return
        if reply.problem is None:
            done.set_result(reply.result)
        else:
            done.set_exception(reply.problem)

    def worker_died(self, worker: WorkerHandle) -> None:
        for asked, done in self._open.values():
            if asked is worker and not done.done():
                done.set_exception(WorkerDied("the worker died; try again"))
