"""The front's side of all workers: where an `EngineLoop` would be, whatever the engines behind it are.

    async with EngineClient(frontend, EngineProcess.start, started) as loop: ...

The front tokenizes, validates and writes JSON; it holds no weights. A routing strategy says which worker a request goes
to. When that worker dies, the request goes on, elsewhere or there: it is sent again with the tokens it has, and the one
who reads its outputs notices nothing but a pause (`serialization.py` says why its tokens stay the same).
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from moesaic.serve.cluster.adapter_table import AdapterTable
from moesaic.serve.cluster.fleet import Fleet
from moesaic.serve.cluster.fleet_stats import FleetStats
from moesaic.serve.cluster.messages import (
    Abort,
    Add,
    EngineOptions,
    FromEngine,
    Handed,
    Lost,
    Outputs,
    Ready,
    Reply,
)
from moesaic.serve.cluster.open_request import OpenRequest
from moesaic.serve.cluster.questions import Questions
from moesaic.serve.cluster.routing import PrefixRouting, Routing
from moesaic.serve.cluster.serialization import deserialize_output, serialize_request
from moesaic.serve.cluster.worker import StartWorker, State, Worker, WorkerHandle
from moesaic.serve.core.engine import Engine
from moesaic.serve.core.engine_loop import EngineFailed, OutputStream, WorkerDied
from moesaic.serve.core.request import Output, Request
from moesaic.serve.core.stats import EngineStats

MAX_ATTEMPTS = 5  # of one request to get its next token: it may be what kills workers
SUSPECT = 2  # deaths after which it is under way only when no other suspect is, so that others outlive it


class Started(NamedTuple):
    """A worker that is ready, and what it was started with."""

    options: EngineOptions
    worker: Worker
    ready: Ready


class EngineClient:
    """Everything runs on the event loop. `max_requests` of the frontend's engine is that of one worker, at first."""

    def __init__(
        self,
        engine: Engine,
        start_worker: StartWorker,
        started: Sequence[Started],
        *,
        routing: Routing | None = None,
        adapters: dict[str, str] | None = None,
        on_outputs: Callable[[Sequence[Output]], None] | None = None,
    ) -> None:
        self.engine = engine
        self.fleet = Fleet(start_worker, self)
        self.routing: Routing = routing or PrefixRouting()
        self.on_outputs = on_outputs
        self.generated_tokens = 0
        self.finished = 0
        self.aborted = 0
        self.resumed = 0  # requests that went on after a worker died
        self.weights = 0  # which of the weights that were served one after the other new requests get
        self.adapters = AdapterTable(engine)
        for name, path in (adapters or {}).items():
            self.adapters.add(name, path)  # shapes only, which show whether it fits the model
        self._started = started
        self._each = engine.scheduler.max_requests
        self._requests: dict[int, OpenRequest] = {}
        self._visits: dict[int, OpenRequest] = {}
        self._waiting: dict[int, OpenRequest] = {}  # for a worker, in the order they came
        self._numbers = itertools.count()  # of visits and questions
        self.questions = Questions(self._numbers)
        self.worker_stats = FleetStats(self.fleet, self.questions)
        self._idle = asyncio.Event()
        self._idle.set()
        self._ended = False

    async def __aenter__(self) -> EngineClient:
        self.fleet.open()
        for options, worker, ready in self._started:
            self.fleet.adopt(options, worker, ready)
        await self.read_stats()
        self._polling = asyncio.create_task(self.worker_stats.poll())
        return self

    async def __aexit__(self, *problem: object) -> None:
        self._ended = True
        self._polling.cancel()
        await asyncio.gather(self._polling, return_exceptions=True)
        await self.fleet.close()

    @property
    def workers(self) -> list[WorkerHandle]:
        return self.fleet.handles

    @property
    def open(self) -> int:
        """Requests submitted that have not finished."""
        return len(self._requests)

    @property
    def alive(self) -> bool:
        return not self._ended

    @property
    def ready(self) -> bool:
        """Whether a request sent now would be worked on."""
        return self.alive and any(worker.state is State.READY for worker in self.workers)

    @property
    def deaths(self) -> int:
        return self.fleet.deaths

    def submit(self, requests: Sequence[Request], seconds: float | None = None) -> OutputStream:
        for request in requests:
            self.adapters.check(request.adapter)
        outputs = OutputStream(self, requests, seconds)
        added = {request.number: OpenRequest(request, outputs.queue) for request in requests}
        self._requests |= added
        self._waiting |= added
        self._idle.clear()
        self._dispatch()
        return outputs

    def forget(self, request: Request) -> None:
        entry = self._requests.pop(request.number)
        self._waiting.pop(request.number, None)
        self._leave(entry)
        if not self._requests:
            self._idle.set()
        self._drop_adapters()
        self.fleet.notify()

    def abort(self, request: Request) -> None:
        entry = self._requests[request.number]
        self.aborted += 1
        self._withdraw(entry)
        self.forget(request)
        if entry.attempts >= SUSPECT:
            self._dispatch()

    def give_up(self, error: Exception) -> None:
        """All open requests fail."""
        self._fail(list(self._requests.values()), error)

    async def until_idle(self) -> None:
        """Return when no request is open."""
        await self._idle.wait()

    # Adapters

    async def load_adapter(self, name: str, path: str) -> None:
        """In every worker, or in none that a request could reach: the front's engine knows it last."""
        key, adapter = self.adapters.read(name, path)
        asked = [self._load(worker, key) for worker in self.workers if worker.ready is not None]
        problems = [one for one in await asyncio.gather(*asked, return_exceptions=True) if isinstance(one, Exception)]
        for problem in problems:
            if not isinstance(problem, WorkerDied):  # which loads it when it has been restarted
                self.adapters.retire(adapter)
                self._drop_adapters()
                raise problem
        self.adapters.use(name, adapter)
        self._drop_adapters()

    async def unload_adapter(self, name: str) -> None:
        """Requests in flight keep it."""
        self.adapters.remove(name)
        self._drop_adapters()

    async def _load(self, worker: WorkerHandle, key: str) -> None:
        worker.adapters.add(key)
        await self.questions.ask(worker, "load_adapter", key, self.adapters.paths[key])

    def _drop_adapters(self) -> None:
        """Unload those that no request can reach any more."""
        if not self.adapters.retired:
            return
        in_use = {entry.request.adapter for entry in self._requests.values()}
        for key in self.adapters.drop(in_use):
            for worker in self.workers:
                if key in worker.adapters and worker.ready is not None:
                    worker.adapters.discard(key)
                    self.questions.tell(worker, "unload_adapter", key)

    # Stats

    def stats(self) -> EngineStats:
        """Of all workers, as last read; what is counted at the front is exact."""
        total = self.worker_stats.total()
        running = min(self.open, total.running)
        return dataclasses.replace(
            total,
            running=running,
            waiting=self.open - running,
            generated_tokens=self.generated_tokens,
            finished=self.finished,
            aborted=self.aborted,
        )

    async def read_stats(self) -> None:
        await self.worker_stats.read()

    # Visits

    def _dispatch(self) -> None:
        """Send every request that waits to the worker that the strategy chooses; what comes together goes together."""
        sent: dict[WorkerHandle, list[tuple[int, dict[str, Any]]]] = {}
        suspected = any(entry.attempts >= SUSPECT for entry in self._visits.values())
        for entry in list(self._waiting.values()):
            if entry.attempts >= SUSPECT:
                if suspected:
                    continue
                suspected = True
            visit = self.routing.choose(entry, self._usable(entry))
            if visit is None:
                continue
            del self._waiting[entry.request.number]
            worker, entry.worker = visit.worker, visit.worker
            entry.visit = next(self._numbers)
            entry.pending_tokens = len(entry.request.prompt) + (entry.request.sampling.max_tokens or 0)
            worker.pending_tokens += entry.pending_tokens
            worker.open[entry.visit] = self._visits[entry.visit] = entry
            data = serialize_request(self.engine, entry.request, self.adapters.key(entry.request.adapter))
            sent.setdefault(worker, []).append((entry.visit, data | visit.extra))
        for worker, some in sent.items():
            worker.send(Add(some))

    def _usable(self, entry: OpenRequest) -> list[WorkerHandle]:
        """Workers that may be given a request. One that has tokens goes on with the weights it began with, as long as
        any worker has them, be it one that takes no new ones."""
        ready = [worker for worker in self.workers if worker.state is State.READY]
        if entry.weights is None or all(worker.weights == entry.weights for worker in ready):
            return ready
        if not any(worker.weights == entry.weights for worker in self.workers):
            return ready
        same = [worker for worker in ready if worker.weights == entry.weights]
        leaving = [one for one in self.workers if one.state is State.DRAINING and one.weights == entry.weights]
        return same or leaving

    def needs(self, worker: WorkerHandle) -> bool:
        """Whether a request cannot go on without this worker."""
        if worker.open:
            return True
        same = [other for other in self.workers if other.weights == worker.weights and other is not worker]
        return not same and any(entry.weights == worker.weights for entry in self._waiting.values())

    def _leave(self, entry: OpenRequest) -> None:
        """Its visit is over."""
        if entry.visit is None or entry.worker is None:
            return
        worker = entry.worker
        del self._visits[entry.visit], worker.open[entry.visit]
        worker.pending_tokens -= entry.pending_tokens
        entry.visit = entry.worker = None
        self.fleet.notify()

    def _withdraw(self, entry: OpenRequest) -> None:
        if entry.visit is not None and entry.worker is not None:
            entry.worker.send(Abort(entry.visit))
            self._leave(entry)

    def move(self, entries: Iterable[OpenRequest]) -> None:
        """Have requests go on elsewhere."""
        for entry in entries:
            self._withdraw(entry)
            self._waiting[entry.request.number] = entry
        self._dispatch()

    def _try_again(self, entries: Sequence[OpenRequest], problem: str) -> None:
        """Visits that ended in a death. Older requests first."""
        for entry in entries:
            self._leave(entry)
            entry.attempts += 1
            if entry.attempts >= MAX_ATTEMPTS:
                entry.queue.put_nowait(WorkerDied(f"{entry.attempts} workers died at this request ({problem})"))
            else:
                self.resumed += 1
                self._waiting[entry.request.number] = entry
        self._waiting = dict(sorted(self._waiting.items()))
        self._dispatch()

    # What workers say

    def worker_ready(self, worker: WorkerHandle) -> None:
        for key in self.adapters.paths:
            if key not in worker.adapters:  # before any request: messages keep their order
                worker.adapters.add(key)
                self.questions.tell(worker, "load_adapter", key, self.adapters.paths[key])
        self.count_slots()
        self._dispatch()

    def worker_died(self, worker: WorkerHandle) -> None:
        self.worker_stats.life_over(worker)
        self.questions.worker_died(worker)
        self._try_again(list(worker.open.values()), worker.problem or "it ended")

    def no_worker_starts(self, problem: str) -> None:
        for entry in self._waiting.values():
            entry.queue.put_nowait(WorkerDied(f"no worker can be started ({problem})"))

    def worker_said(self, worker: WorkerHandle, message: FromEngine) -> None:
        if isinstance(message, Outputs):
            self._deliver(worker, message.outputs)
        elif isinstance(message, Lost):
            lost = [self._visits[number] for number in message.numbers if number in self._visits]
            if message.again:
                self._try_again(lost, message.problem)
            else:
                self._fail(lost, EngineFailed(f"the engine failed ({message.problem})"))
        elif isinstance(message, Handed):
            if (entry := self._visits.get(message.number)) is not None:
                self._leave(entry)
                self.routing.handed(entry, message.what)
                self._waiting[entry.request.number] = entry
                self._dispatch()
        elif isinstance(message, Reply):
            self.questions.answer(message)

    def _fail(self, entries: Sequence[OpenRequest], error: Exception) -> None:
        # One queue may hold several requests, and all of them fail together.
        for entry in entries:
            self._leave(entry)
        for queue in {id(entry.queue): entry.queue for entry in entries}.values():
            queue.put_nowait(error)

    def _deliver(self, worker: WorkerHandle, found: list[tuple[int, tuple[Any, ...]]]) -> None:
        now = self.engine.clock()
        outputs, cleared = [], False
        for number, data in found:
            if (entry := self._visits.get(number)) is not None:  # else it was aborted meanwhile, or moved
                output = deserialize_output(entry.request, data, now)
                cleared |= entry.attempts >= SUSPECT
                entry.attempts, entry.weights = 0, worker.weights
                self.generated_tokens += len(output.tokens)
                if output.finish_reason is not None:
                    self.finished += 1
                    worker.served = True
                    self._leave(entry)
                outputs.append(output)
                entry.queue.put_nowait(output)
        if self.on_outputs is not None:
            self.on_outputs(outputs)
        if cleared:
            self._dispatch()

    def count_slots(self) -> None:
        """The front's engine computes nothing, but says how many requests run at the same time."""
        ready = sum(worker.state is State.READY for worker in self.workers)
        self.engine.scheduler.max_requests = self._each * max(1, ready)
