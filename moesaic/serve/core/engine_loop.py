"""An engine on a thread of its own, for an asynchronous program: submit requests, receive outputs as they come.

    loop = EngineLoop(engine)
    async with loop:
        outputs = loop.submit([request])
        try:
            async for output in outputs: ...
        finally:
            outputs.close()     # aborts what has not finished

The thread sleeps while there is nothing to do. Everything but `_run` and what it calls runs on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any, Protocol

from moesaic.serve.core.driver import EngineDriver
from moesaic.serve.core.engine import Engine
from moesaic.serve.core.request import Output, Request
from moesaic.serve.core.stats import EngineStats

logger = logging.getLogger("moesaic.serve")

Queue = asyncio.Queue[Output | BaseException]


class EngineFailed(Exception):
    """A step failed by an error of our own; the requests the engine held are lost."""


class WorkerDied(EngineFailed):
    """The worker of a request died, and it could not go on elsewhere."""


class EngineLoop:
    """`on_outputs` is called with the outputs of every step, on the engine's thread."""

    def __init__(self, engine: Engine, on_outputs: Callable[[Sequence[Output]], None] | None = None) -> None:
        self.engine = engine
        self.open = 0  # requests submitted that have not finished
        self._driver: EngineDriver[Queue] = EngineDriver(engine, on_outputs)
        self._wake = threading.Event()
        engine.wake = self._wake.set
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
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
        if self.engine.outside is not None:
            await asyncio.to_thread(self.engine.outside.close)

    def submit(self, requests: Sequence[Request], seconds: float | None = None) -> OutputStream:
        """Submit requests together; their outputs are read from what is returned, which must be closed."""
        outputs = OutputStream(self, requests, seconds)
        for request in requests:
            self.engine.call(partial(self._add, request, outputs.queue))
        self.open += len(requests)
        self._idle.clear()
        self._wake.set()
        return outputs

    async def call(self, function: Callable[[], Any]) -> Any:
        """Run something on the engine's thread, between two steps, and wait for its result."""
        done: asyncio.Future[Any] = self._events.create_future()

        def run() -> None:
            result: Any = None
            problem: Exception | None = None
            try:
                result = function()
            except Exception as error:
                problem = error
            self._post(partial(_resolve, done, result, problem))

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

    @property
    def ready(self) -> bool:
        """Whether a request sent now would be worked on."""
        return self.alive

    def stats(self) -> EngineStats:
        return EngineStats.of(self.engine)

    async def until_idle(self) -> None:
        """Return when no request is open."""
        await self._idle.wait()

    def forget(self, request: Request) -> None:
        self.open -= 1
        if not self.open:
            self._idle.set()

    def abort(self, request: Request) -> None:
        self.forget(request)
        self.stop(request)

    def stop(self, request: Request) -> None:
        """Abort a request whose outputs are still read: whoever calls this ends them."""
        self.engine.call(lambda: self._driver.abort(request))
        self._wake.set()

    # On the engine's thread

    def _run(self) -> None:
        for step in self._driver.steps(self._wake, lambda: self._ended):
            if step.error is not None:
                # One queue may hold several requests, and all of them fail together.
                queues = {id(queue): queue for queue in step.lost}.values()
                self._post(partial(_deliver, [(queue, step.error) for queue in queues]))
            elif step.outputs:
                self._post(partial(_deliver, step.outputs))

    def _add(self, request: Request, queue: Queue) -> None:
        """A request that fails here is not yet among those the engine holds."""
        try:
            self._driver.add(request, queue)
        except BaseException as error:
            logger.error("the engine could not add a request", exc_info=error)
            self._post(partial(_deliver, [(queue, error)]))

    def _post(self, callback: Callable[[], None]) -> None:
        if not self._events.is_closed():
            self._events.call_soon_threadsafe(callback)


def _deliver(events: Sequence[tuple[Queue, Output | BaseException]]) -> None:
    for queue, event in events:
        queue.put_nowait(event)


class Submitter(Protocol):
    """Where requests were submitted: an engine's loop, or the client of its workers."""

    def forget(self, request: Request) -> None: ...

    def abort(self, request: Request) -> None: ...


class OutputStream:
    """The outputs of some requests, until all of them have finished or `seconds` have passed: one by one, or in batches
    of all that have come since, which cost those who are behind little more than one."""

    def __init__(self, loop: Submitter, requests: Sequence[Request], seconds: float | None) -> None:
        self.loop = loop
        self.requests = requests
        self.queue: Queue = asyncio.Queue()
        self.waiting = {request.number: request for request in requests}
        events = asyncio.get_running_loop()
        self.timer = None if seconds is None else events.call_later(seconds, self.queue.put_nowait, TimeoutError())

    def __aiter__(self) -> OutputStream:
        return self

    async def __anext__(self) -> Output:
        if not self.waiting:
            raise StopAsyncIteration
        return self._take(await self.queue.get())

    async def batches(self) -> AsyncIterator[list[Output]]:
        while self.waiting:
            batch = [self._take(await self.queue.get())]
            try:
                while self.waiting and not self.queue.empty():
                    batch.append(self._take(self.queue.get_nowait()))
            except (EngineFailed, TimeoutError) as error:  # after what came before it
                yield batch
                raise error
            yield batch

    def _take(self, output: Output | BaseException) -> Output:
        if isinstance(output, EngineFailed | TimeoutError):
            raise output
        if isinstance(output, BaseException):
            raise EngineFailed("the engine failed") from output
        if output.finish_reason is not None:
            self.loop.forget(self.waiting.pop(output.request.number))
        return output

    def close(self) -> None:
        """Abort what has not finished."""
        if self.timer is not None:
            self.timer.cancel()
        while self.waiting:
            self.loop.abort(self.waiting.popitem()[1])


def _resolve(done: asyncio.Future[Any], result: Any, problem: Exception | None) -> None:
    if done.cancelled():
        return
    if problem is not None:
        done.set_exception(problem)
    else:
        done.set_result(result)
