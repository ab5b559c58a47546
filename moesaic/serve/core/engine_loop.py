"""An engine on a thread of its own, for a program that is asynchronous: hand requests over, get outputs as they come.

    loop = EngineLoop(engine)
    async with loop:
        answers = loop.submit([request])
        try:
            async for output in answers: ...
        finally:
            answers.close()     # aborts what has not ended

The thread sleeps while there is nothing to do. Everything but `_work` and what it calls runs on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from moesaic.serve.core.engine import Engine
from moesaic.serve.core.request import Output, Request

logger = logging.getLogger("moesaic.serve")

# How long to wait before asking again, when there are requests of which none can go on now.
PATIENCE = 0.005

Queue = asyncio.Queue[Output | BaseException]


class EngineFailed(Exception):
    """The engine stumbled over a mistake of our own; the requests it held are lost."""


class ReplicaDied(EngineFailed):
    """One of several engines went away; the others serve on."""


class EngineLoop:
    """`watch` is told the outputs of every step, on the engine's thread."""

    def __init__(self, engine: Engine, watch: Callable[[Sequence[Output]], None] | None = None) -> None:
        self.engine = engine
        self.watch = watch
        self.open = 0  # requests handed over that have not ended
        self._queues: dict[int, Queue] = {}
        self._wake = threading.Event()
        self._ended = False
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self._idle = asyncio.Event()
        self._idle.set()

    async def __aenter__(self) -> EngineLoop:
        self._events = asyncio.get_running_loop()
        self._thread.start()
        return self

    async def __aexit__(self, *problem: object) -> None:
        self._ended = True
        self._wake.set()
        await asyncio.to_thread(self._thread.join)

    def submit(self, requests: Sequence[Request], seconds: float | None = None) -> Answers:
        """Hand requests over at once; what comes of them is read from the answers, which must be closed."""
        answers = Answers(self, requests, seconds)
        for request in requests:
            self._queues[request.number] = answers.queue
            self.engine.call(partial(self._add, request))
        self.open += len(requests)
        self._idle.clear()
        self._wake.set()
        return answers

    async def call(self, note: Callable[[], Any]) -> Any:
        """Have something done on the engine's thread, between two steps, and wait for what comes of it."""
        done: asyncio.Future[Any] = self._events.create_future()

        def run() -> None:
            result: Any = None
            problem: Exception | None = None
            try:
                result = note()
            except Exception as error:
                problem = error
            self._tell(partial(_settle, done, result, problem))

        self.engine.call(run)
        self._wake.set()
        return await done

    async def load_adapter(self, name: str, path: str) -> None:
        await self.call(lambda: self.engine.load_adapter(name, path))

    async def unload_adapter(self, name: str) -> None:
        await self.call(lambda: self.engine.unload_adapter(name))

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._ended

    async def until_idle(self) -> None:
        """Return when no request is open."""
        await self._idle.wait()

    def forget(self, request: Request) -> None:
        del self._queues[request.number]
        self.open -= 1
        if not self.open:
            self._idle.set()

    def abort(self, request: Request) -> None:
        self.forget(request)
        self.engine.call(lambda: self.engine.abort(request))
        self._wake.set()

    # On the engine's thread

    def _work(self) -> None:
        engine = self.engine
        while not self._ended:
            self._wake.clear()
            if not engine.working:
                self._wake.wait()
                continue
            before = engine.counts.busy_seconds
            try:
                outputs = engine.step()
                if self.watch is not None:
                    self.watch(outputs)
            except BaseException as error:  # also the panics of libraries, which are no Exceptions
                self._recover(error)
                continue
            if outputs:
                self._tell(partial(self._deliver, outputs))
            elif engine.counts.busy_seconds == before:
                self._wake.wait(PATIENCE)

    def _add(self, request: Request) -> None:
        """One that the engine stumbles over is not among those it holds, and must be told of here."""
        try:
            self.engine.add(request)
        except BaseException as error:
            logger.error("the engine could not take a request", exc_info=error)
            self._tell(partial(self._deliver_failure, [request], error))

    def _recover(self, error: BaseException) -> None:
        """Give up the requests the engine holds, and begin anew: nothing they computed is kept."""
        logger.error("the engine failed; its requests are given up", exc_info=error)
        scheduler = self.engine.scheduler
        lost = list(scheduler.requests.values())
        scheduler.stopped.clear()
        for request in lost:
            request.busy, request.root = False, None  # so that its pages are freed, not shared
            request.finish_reason = request.finish_reason or "error"
            self.engine.abort(request)  # which nothing that goes with it outlives, such as a drafter's notes
        self._tell(partial(self._deliver_failure, lost, error))

    def _tell(self, note: Callable[[], None]) -> None:
        if not self._events.is_closed():
            self._events.call_soon_threadsafe(note)

    # Back on the event loop

    def _deliver(self, outputs: Sequence[Output]) -> None:
        for output in outputs:
            queue = self._queues.get(output.request.number)
            if queue is not None:  # else it was abandoned
                queue.put_nowait(output)

    def _deliver_failure(self, lost: Sequence[Request], error: BaseException) -> None:
        for queue in {id(queue): queue for request in lost if (queue := self._queues.get(request.number))}.values():
            queue.put_nowait(error)


class Holder(Protocol):
    """Who has been handed requests: an engine's loop, or several replicas."""

    def forget(self, request: Request) -> None: ...

    def abort(self, request: Request) -> None: ...


class Answers:
    """What the engine adds to some requests, until all of them have ended or `seconds` have passed."""

    def __init__(self, loop: Holder, requests: Sequence[Request], seconds: float | None) -> None:
        self.loop = loop
        self.requests = requests
        self.queue: Queue = asyncio.Queue()
        self.waiting = {request.number: request for request in requests}
        self.until = None if seconds is None else asyncio.get_running_loop().time() + seconds

    def __aiter__(self) -> Answers:
        return self

    async def __anext__(self) -> Output:
        if not self.waiting:
            raise StopAsyncIteration
        async with asyncio.timeout_at(self.until):
            output = await self.queue.get()
        if isinstance(output, EngineFailed):
            raise output
        if isinstance(output, BaseException):
            raise EngineFailed("the engine failed") from output
        if output.finish_reason is not None:
            self.loop.forget(self.waiting.pop(output.request.number))
        return output

    def close(self) -> None:
        """What has not ended is aborted."""
        while self.waiting:
            self.loop.abort(self.waiting.popitem()[1])


def _settle(done: asyncio.Future[Any], result: Any, problem: Exception | None) -> None:
    if done.cancelled():
        return
    if problem is not None:
        done.set_exception(problem)
    else:
        done.set_result(result)
