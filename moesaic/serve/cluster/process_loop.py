"""The frontend of an engine in a process of its own: the event loop and the engine never wait for each other's Python.

    process = EngineProcess.start(options)
    frontend = frontend_engine(directory, pages=process.wait().pages)
    async with ProcessLoop(frontend, options, process) as loop: ...      where an EngineLoop would be

The frontend tokenizes, validates and writes JSON; it holds no weights. When the process dies it is restarted: requests
without any output are sent again, the others end with an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from moesaic.serve.cluster.engine_process import Abort, Add, Ask, EngineOptions, EngineProcess, Lost, Outputs, Reply
from moesaic.serve.cluster.replica import deserialize_output, serialize_request
from moesaic.serve.cluster.replicas import MAX_ATTEMPTS, RESTART_SECONDS, STATS_SECONDS
from moesaic.serve.core.adapters import load_adapter
from moesaic.serve.core.engine import Engine
from moesaic.serve.core.engine_loop import EngineFailed, OutputStream, Queue, ReplicaDied
from moesaic.serve.core.request import Output, Request
from moesaic.serve.core.stats import EngineStats

logger = logging.getLogger("moesaic.serve")


@dataclasses.dataclass
class OpenRequest:
    request: Request
    queue: Queue
    attempts: int = 0


class ProcessLoop:
    """In place of an `EngineLoop`. Everything but `_read` runs on the event loop."""

    def __init__(
        self,
        engine: Engine,
        options: EngineOptions,
        process: EngineProcess,
        on_outputs: Callable[[Sequence[Output]], None] | None = None,
    ) -> None:
        self.engine = engine
        self.options = options
        self.process = process
        self.on_outputs = on_outputs
        self.generated_tokens = 0
        self.finished = 0
        self.deaths = 0
        self._ready = True
        self._ended = False
        self._requests: dict[int, OpenRequest] = {}
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._asks = itertools.count()
        self._idle = asyncio.Event()
        self._idle.set()
        self._stats = EngineStats()  # as last read
        self._dead_stats = EngineStats()  # of processes that died

    async def __aenter__(self) -> ProcessLoop:
        self._events = asyncio.get_running_loop()
        self._listen()
        await self.read_stats()
        self._polling = asyncio.create_task(self._poll_stats())
        self._restarting: asyncio.Task[None] | None = None
        return self

    async def __aexit__(self, *problem: object) -> None:
        self._ended = True
        tasks = [task for task in (self._polling, self._restarting) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.to_thread(self.process.end)

    @property
    def open(self) -> int:
        """Requests submitted that have not finished."""
        return len(self._requests)

    @property
    def alive(self) -> bool:
        return self._ready and not self._ended

    def submit(self, requests: Sequence[Request], seconds: float | None = None) -> OutputStream:
        outputs = OutputStream(self, requests, seconds)
        added = {request.number: OpenRequest(request, outputs.queue) for request in requests}
        self._requests |= added
        self._idle.clear()
        if self._ready:  # else when it is again
            self._send(list(added.values()))
        return outputs

    def forget(self, request: Request) -> None:
        del self._requests[request.number]
        if not self._requests:
            self._idle.set()

    def abort(self, request: Request) -> None:
        self.forget(request)
        self.process.send(Abort(request.number))

    async def until_idle(self) -> None:
        """Return when no request is open."""
        await self._idle.wait()

    async def load_adapter(self, name: str, path: str) -> None:
        """The frontend's engine, which lets requests pass, loads it last."""
        path = str(Path(path).resolve())
        loaded = load_adapter(self.engine.model, path, name)
        await self._ask("load_adapter", name, path)
        self.options.adapters[name] = path
        self.engine.adapters[name] = loaded

    async def unload_adapter(self, name: str) -> None:
        """Requests in flight keep it."""
        self.engine.unload_adapter(name)
        self.options.adapters.pop(name, None)
        await self._ask("unload_adapter", name)

    def stats(self) -> EngineStats:
        """As last read; what is counted at the frontend is exact."""
        total = self._stats + self._dead_stats
        running = min(self.open, total.running)
        return dataclasses.replace(
            total,
            running=running,
            waiting=self.open - running,
            generated_tokens=self.generated_tokens,
            finished=self.finished,
        )

    async def read_stats(self) -> None:
        """One that died is counted as it last was."""
        with contextlib.suppress(EngineFailed):
            self._stats = await self._ask("stats")

    async def _poll_stats(self) -> None:
        while True:
            await asyncio.sleep(STATS_SECONDS)
            await self.read_stats()

    # Messages

    def _send(self, some: Sequence[OpenRequest]) -> None:
        for entry in some:
            entry.attempts += 1
        data = [(entry.request.number, serialize_request(self.engine, entry.request)) for entry in some]
        self.process.send(Add(data))

    async def _ask(self, method: str, *arguments: Any) -> Any:
        if not self.alive:
            raise ReplicaDied("the engine is being restarted; try again")
        number = next(self._asks)
        self._asked[number] = self._events.create_future()
        self.process.send(Ask(number, method, arguments))
        return await self._asked[number]

    def _listen(self) -> None:
        threading.Thread(target=self._read, args=(self.process,), name="engine outputs", daemon=True).start()

    def _read(self, process: EngineProcess) -> None:
        while True:
            try:
                message = process.pipe.recv()
            except (EOFError, OSError):
                self._post(partial(self._died, process))
                return
            self._post(partial(self._take, message))

    def _post(self, callback: Callable[[], None]) -> None:
        if not self._events.is_closed():
            self._events.call_soon_threadsafe(callback)

    def _take(self, message: Outputs | Lost | Reply) -> None:
        if isinstance(message, Outputs):
            self._deliver(message.outputs)
        elif isinstance(message, Lost):
            error = EngineFailed(f"the engine failed ({message.problem})")
            # One queue may hold several requests, and all of them fail together.
            lost = [self._requests[number].queue for number in message.numbers if number in self._requests]
            for queue in {id(queue): queue for queue in lost}.values():
                queue.put_nowait(error)
        elif not (done := self._asked.pop(message.ask)).cancelled():
            if message.problem is None:
                done.set_result(message.result)
            else:
                done.set_exception(message.problem)

    def _deliver(self, found: list[tuple[int, tuple[Any, ...]]]) -> None:
        now = self.engine.clock()
        outputs = []
        for number, data in found:
            if (entry := self._requests.get(number)) is not None:  # else it was aborted meanwhile
                output = deserialize_output(entry.request, data, now)
                self.generated_tokens += len(output.tokens)
                self.finished += output.finish_reason is not None
                outputs.append(output)
                entry.queue.put_nowait(output)
        if self.on_outputs is not None:
            self.on_outputs(outputs)

    # Death and restart

    def _died(self, process: EngineProcess) -> None:
        if self._ended:
            return
        logger.error("the engine's process died (exit code %s); restarting it", process.process.exitcode)
        self.deaths += 1
        self._ready = False
        # Counters never go back, but its pages and its requests are gone.
        self._dead_stats += dataclasses.replace(self._stats, pages=0, pages_in_use=0, running=0, waiting=0)
        self._stats = EngineStats()
        for done in self._asked.values():
            if not done.done():
                done.set_exception(ReplicaDied("the engine died; try again"))
        self._asked.clear()
        for entry in list(self._requests.values()):
            if entry.request.first_token is not None or entry.attempts >= MAX_ATTEMPTS:
                entry.queue.put_nowait(ReplicaDied("the engine died at this request; send it again"))
        self._restarting = asyncio.create_task(self._restart())

    async def _restart(self) -> None:
        for attempt in itertools.count():
            await asyncio.sleep(min(60.0, RESTART_SECONDS * 2**attempt))
            process = EngineProcess.start(self.options)
            try:
                await asyncio.to_thread(process.wait)
                break
            except Exception as error:
                logger.error("the engine cannot be restarted: %s", error)
            except asyncio.CancelledError:
                process.process.kill()
                raise
        self.process, self._ready = process, True
        self._listen()
        self._send([entry for entry in self._requests.values() if entry.request.first_token is None])
