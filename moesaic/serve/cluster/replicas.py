"""Replicas of an engine in processes of their own, on one machine or many: `moesaic serve DIR --replicas N`, on Ray.

    async with Replicas(frontend_engine(directory), directory, count=2) as loop: ...      where an EngineLoop would be

The frontend tokenizes, validates and routes; it holds no weights. A request is routed to the replica with the fewest
tokens to compute before it: those of its other requests, plus those of the prompt that are not in its prefix cache
(`prefix_routing.py`). When a replica dies, requests without any output are retried on another, the others end with an
error, and the replica is restarted.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from moesaic.errors import UserError
from moesaic.model.formats.matching import match
from moesaic.model.formats.opening import open_checkpoint
from moesaic.model.tokenizer import Tokenizer
from moesaic.model.transformer import Model
from moesaic.serve.cluster.prefix_routing import PrefixIndex
from moesaic.serve.cluster.replica import Replica, deserialize_output, serialize_request
from moesaic.serve.core.adapters import load_adapter
from moesaic.serve.core.engine import PAGE_SIZE, Engine
from moesaic.serve.core.engine_loop import OutputStream, Queue, ReplicaDied
from moesaic.serve.core.memory import dtype_of_cache, page_bytes
from moesaic.serve.core.request import Output, Request
from moesaic.serve.core.stats import EngineStats

logger = logging.getLogger("moesaic.serve")

MAX_ATTEMPTS = 5  # of one request, which may be what kills replicas
RESTART_SECONDS = 1.0  # before a replica that died is restarted; doubled while it keeps dying
STATS_SECONDS = 1.0  # between two reads of a replica's stats


def frontend_engine(directory: Path, *, pages: int | None = None, **engine_options: Any) -> Engine:
    """An engine that validates requests and computes nothing: its weights and its KV cache are on the meta device.
    `pages`, where that is known, are how many the cache of the engine behind it has."""
    source = open_checkpoint(directory)
    config, _ = match(source)
    with torch.device("meta"):
        model = Model(config)
    model.tokenizer = Tokenizer.from_files(source.files, source.place)
    if pages is not None:
        dtype = dtype_of_cache(model, engine_options.get("cache_dtype"))
        engine_options["cache_bytes"] = pages * page_bytes(model, PAGE_SIZE, dtype)
    return Engine(model, **engine_options)


@dataclasses.dataclass
class ReplicaHandle:
    """One replica as the frontend knows it."""

    number: int
    actor: Any = None
    page_size: int = 16
    pending_tokens: int = 0  # to prefill and decode, at most
    prefixes: PrefixIndex = dataclasses.field(default_factory=PrefixIndex)
    ready: bool = False
    stats: EngineStats = dataclasses.field(default_factory=EngineStats)  # as last read


class Replicas:
    """In place of an `EngineLoop`. `load_options` are for `load`, `engine_options` for `Engine`, in every replica."""

    def __init__(
        self,
        engine: Engine,
        directory: Path,
        count: int,
        *,
        load_options: dict[str, Any] | None = None,
        engine_options: dict[str, Any] | None = None,
        adapters: dict[str, str] | None = None,
        resources: dict[str, Any] | None = None,
        on_outputs: Callable[[Sequence[Output]], None] | None = None,
    ) -> None:
        if count < 1:
            raise UserError("--replicas", f"must be at least 1, not {count}")
        self.engine = engine
        self.on_outputs = on_outputs
        self.open = 0
        self.deaths = 0
        self.generated_tokens = 0
        self.finished = 0
        self.replicas = [ReplicaHandle(number) for number in range(count)]
        self.adapters = {name: str(Path(path).resolve()) for name, path in (adapters or {}).items()}
        for name, path in self.adapters.items():
            engine.load_adapter(name, path)  # shapes only, which show whether it fits the model
        self._replica_args = (str(directory.resolve()), load_options or {}, engine_options or {})
        # No CPUs are reserved: where there are fewer than replicas, they share them.
        self._resources = resources or {"num_cpus": 0, "scheduling_strategy": "SPREAD"}
        self._assigned: dict[int, ReplicaHandle] = {}  # by the number of a request
        self._queues: dict[int, Queue] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._ready = asyncio.Event()  # set when a replica becomes ready
        self._ended = False
        self._dead_stats = EngineStats()  # of replicas that died

    async def __aenter__(self) -> Replicas:
        try:
            import ray
        except ModuleNotFoundError:
            raise UserError("--replicas", "needs Ray", "Install moesaic[cluster].") from None
        self._ray = ray
        self._started_ray = not ray.is_initialized()
        if self._started_ray:
            await asyncio.to_thread(ray.init, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
        await asyncio.gather(*(self._start(replica) for replica in self.replicas))
        self._polling = asyncio.create_task(self._poll_stats())
        return self

    async def __aexit__(self, *problem: object) -> None:
        self._ended = True
        tasks = [*self._tasks, self._polling]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for replica in self.replicas:
            if replica.actor is not None:
                self._ray.kill(replica.actor)
        if self._started_ray:
            await asyncio.to_thread(self._ray.shutdown)

    @property
    def alive(self) -> bool:
        return not self._ended and any(replica.ready for replica in self.replicas)

    def submit(self, requests: Sequence[Request], seconds: float | None = None) -> OutputStream:
        outputs = OutputStream(self, requests, seconds)
        for request in requests:
            self._queues[request.number] = outputs.queue
            self._spawn(self._serve(request, outputs.queue))
        self.open += len(requests)
        self._idle.clear()
        return outputs

    async def call(self, function: Callable[[], Any]) -> Any:
        raise UserError("--replicas", "engines cannot be changed while they serve", "Restart the server.")

    async def load_adapter(self, name: str, path: str) -> None:
        """In every replica, or in none that a request could reach: the frontend's engine loads it last."""
        path = str(Path(path).resolve())
        loaded = load_adapter(self.engine.model, path, name)
        self.adapters[name] = path
        try:
            await asyncio.gather(*(replica.actor.load_adapter.remote(name, path) for replica in self._alive()))
        except self._ray.exceptions.RayTaskError as error:
            self.adapters.pop(name, None)
            raise UserError("adapter", f"a replica cannot load {name!r} ({error.cause})") from None
        self.engine.adapters[name] = loaded

    async def unload_adapter(self, name: str) -> None:
        """Requests in flight keep it."""
        self.engine.unload_adapter(name)
        self.adapters.pop(name, None)
        await asyncio.gather(*(replica.actor.unload_adapter.remote(name) for replica in self._alive()))

    def stats(self) -> EngineStats:
        """Of all replicas, as last read; what is counted at the frontend is exact."""
        total = sum((replica.stats for replica in self.replicas), self._dead_stats)
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
        for replica in self._alive():
            try:
                replica.stats = await replica.actor.stats.remote()
            except self._ray.exceptions.RayActorError:
                self._died(replica)

    async def _poll_stats(self) -> None:
        while True:
            await asyncio.sleep(STATS_SECONDS)
            await self.read_stats()

    def _alive(self) -> list[ReplicaHandle]:
        return [replica for replica in self.replicas if replica.ready]

    async def until_idle(self) -> None:
        await self._idle.wait()

    def forget(self, request: Request) -> None:
        del self._queues[request.number]
        self.open -= 1
        if not self.open:
            self._idle.set()

    def abort(self, request: Request) -> None:
        self.forget(request)
        if (replica := self._assigned.get(request.number)) is not None and replica.ready:
            replica.actor.abort.remote(request.number)

    # One request

    async def _serve(self, request: Request, queue: Queue) -> None:
        """Try one replica after the other, until one lives long enough."""
        for _ in range(MAX_ATTEMPTS):
            replica = await self._route(request)
            if request.number not in self._queues:
                return  # it was aborted meanwhile
            tokens = len(request.prompt) + (request.sampling.max_tokens or 0)
            replica.pending_tokens += tokens
            self._assigned[request.number] = replica
            try:
                await self._stream(replica, request, queue)
                return
            except self._ray.exceptions.RayActorError:
                self._died(replica)
                if request.written or request.first_token is not None:
                    queue.put_nowait(ReplicaDied("the replica of this request died; send it again"))
                    return
            except self._ray.exceptions.RayTaskError as error:
                queue.put_nowait(error)
                return
            finally:
                replica.pending_tokens -= tokens
                del self._assigned[request.number]
        queue.put_nowait(ReplicaDied(f"{MAX_ATTEMPTS} replicas died at this request"))

    async def _stream(self, replica: ReplicaHandle, request: Request, queue: Queue) -> None:
        replica.prefixes.add(cache_namespace(request), request.prompt, replica.page_size)
        data = serialize_request(self.engine, request)
        stream = replica.actor.generate.options(num_returns="streaming").remote(request.number, data)
        async for reference in stream:
            output = deserialize_output(request, await reference, self.engine.clock())
            self.generated_tokens += len(output.tokens)
            if output.finish_reason is not None:
                self.finished += 1
            if self.on_outputs is not None:
                self.on_outputs([output])
            if request.number in self._queues:
                queue.put_nowait(output)
            if output.finish_reason is not None:
                return

    async def _route(self, request: Request) -> ReplicaHandle:
        """The replica with the fewest tokens to compute before this request is done."""
        while not (ready := self._alive()):
            self._ready.clear()
            await self._ready.wait()
        namespace, prompt = cache_namespace(request), request.prompt

        def cost(replica: ReplicaHandle) -> tuple[int, int, int]:
            cached = replica.prefixes.tokens(namespace, prompt, replica.page_size)
            return replica.pending_tokens + len(prompt) - cached, len(replica.prefixes.pages), replica.number

        return min(ready, key=cost)

    # Start and restart

    async def _start(self, replica: ReplicaHandle) -> None:
        # Streams and aborts run concurrently in one replica, on its event loop.
        kind = self._ray.remote(Replica)
        replica.actor = kind.options(max_concurrency=10_000, **self._resources).remote(*self._replica_args)
        replica.page_size = await replica.actor.ready.remote()
        await asyncio.gather(*(replica.actor.load_adapter.remote(*entry) for entry in self.adapters.items()))
        replica.ready = True
        self._ready.set()

    def _died(self, replica: ReplicaHandle) -> None:
        """Restart it, once, with an empty cache."""
        if not replica.ready or self._ended:
            return
        logger.error("replica %d died; restarting it", replica.number)
        self.deaths += 1
        replica.ready, replica.prefixes = False, PrefixIndex()
        # Counters never go back, but its pages and its requests are gone.
        self._dead_stats += dataclasses.replace(replica.stats, pages=0, pages_in_use=0, running=0, waiting=0)
        replica.stats = EngineStats()
        self._spawn(self._restart(replica))

    async def _restart(self, replica: ReplicaHandle) -> None:
        for attempt in itertools.count():
            await asyncio.sleep(min(60.0, RESTART_SECONDS * 2**attempt))
            try:
                await self._start(replica)
                return
            except self._ray.exceptions.RayError as error:
                logger.error("replica %d cannot be restarted: %s", replica.number, error)

    def _spawn(self, work: Any) -> None:
        self._tasks.add(task := asyncio.create_task(work))
        task.add_done_callback(self._tasks.discard)


def cache_namespace(request: Request) -> str:
    """Requests of different namespaces share no pages."""
    return f"{request.adapter.name if request.adapter else ''}/{request.salt}"
