"""Engines in several processes, on one machine or many, behind one front: `moesaic serve DIR --replicas N`, on Ray.

    async with Replicas(front_engine(directory), directory, count=2) as loop: ...      where an EngineLoop would be

The front tokenises, checks and routes; it holds no weights. A request goes where least is left to compute for it: what
the replica still owes to others, plus what of the prompt it has not in its cache (`prefix_routing.py`). When a replica
dies, requests of which nothing was sent yet begin again elsewhere, the others end with an error that says so, and a new
replica takes its place.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from moesaic.errors import UserError
from moesaic.kernels import hardware
from moesaic.model.formats.matching import match
from moesaic.model.formats.opening import open_checkpoint
from moesaic.model.tokenizer import Tokenizer
from moesaic.model.transformer import Model
from moesaic.serve.cluster.prefix_routing import PrefixIndex
from moesaic.serve.cluster.replica import Replica, plain_wish, read_output
from moesaic.serve.core.adapters import load_adapter
from moesaic.serve.core.engine import Engine
from moesaic.serve.core.engine_loop import OutputStream, Queue, ReplicaDied
from moesaic.serve.core.memory import SHARE, free_bytes
from moesaic.serve.core.page_pool import PagePool
from moesaic.serve.core.request import Output, Request

logger = logging.getLogger("moesaic.serve")

TRIES = 5  # of one request, before we think that it is what kills replicas
PAUSE = 1.0  # seconds before a replica that died is begun again; doubled while it keeps dying
ASKING = 1.0  # seconds between two questions what a replica has done


class ToldBlocks(PagePool):
    """The front's, which has no pages of its own: what the replicas told of theirs."""

    told = 0.0  # the share of all their pages that is in use

    @property
    def in_use(self) -> int:
        return round(self.told * self.cache.pages)


def front_engine(directory: Path, **options: Any) -> Engine:
    """An engine that checks requests and computes nothing: its weights and its cache have shapes only."""
    source = open_checkpoint(directory)
    config, _ = match(source)
    with torch.device("meta"):
        model = Model(config)
    model.tokenizer = Tokenizer.from_files(source.files, source.place)
    engine = Engine(model, **options)
    engine.page_pool = ToldBlocks(engine.cache, store=engine.page_pool.store)
    engine.experts.counts = torch.zeros_like(engine.experts.counts, device="cpu")
    return engine


def with_replicas(
    directory: Path,
    count: int,
    cache_bytes: int | None,
    seed: int | None,
    weights: dict[str, Any],
    options: dict[str, Any],
    adapters: dict[str, str],
) -> tuple[Engine, Callable[..., Replicas]]:
    """The front's engine, and what makes the loop behind it. Replicas on one machine share its cores, and its memory
    for caches; on GPUs each has its own."""
    on_gpu = torch.cuda.is_available() and str(weights.get("device") or "cuda").startswith("cuda")
    if cache_bytes is None and not on_gpu:
        cache_bytes = int(free_bytes(torch.device("cpu")) * SHARE) // count
    if not weights.get("threads") and not on_gpu:
        weights = weights | {"threads": max(1, hardware.threads() // count)}
    front = front_engine(
        directory,
        cache_bytes=cache_bytes,
        seed=seed,
        max_requests=options["max_requests"] * count,
        kv_policy=options.get("kv_policy"),
        cache_dtype=options.get("cache_dtype"),
    )
    make_loop = partial(
        Replicas,
        directory=directory,
        count=count,
        weights=weights,
        options=options | {"cache_bytes": cache_bytes},
        adapters=adapters,
        resources={"num_gpus": 1} if on_gpu else None,
    )
    return front, make_loop


@dataclasses.dataclass
class Place:
    """One replica as the front knows it."""

    number: int
    actor: Any = None
    size: int = 16  # of its pages
    owed: int = 0  # tokens it has still to compute, at most
    seen: PrefixIndex = dataclasses.field(default_factory=PrefixIndex)
    ready: bool = False
    told: dict[str, Any] | None = None  # what it has done, when last asked


class Replicas:
    """The same to its users as an `EngineLoop`. `weights` goes to `load`, `options` to `Engine`, in every replica."""

    def __init__(
        self,
        engine: Engine,
        directory: Path,
        count: int,
        *,
        weights: dict[str, Any] | None = None,
        options: dict[str, Any] | None = None,
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
        self.places = [Place(number) for number in range(count)]
        self.adapters = {name: str(Path(path).resolve()) for name, path in (adapters or {}).items()}
        for name, path in self.adapters.items():
            engine.load_adapter(name, path)  # shapes only, which is enough to see whether it fits
        self._begin = (str(directory.resolve()), weights or {}, options or {})
        # No processors are reserved: where there are fewer than replicas, they share them.
        self._resources = resources or {"num_cpus": 0, "scheduling_strategy": "SPREAD"}
        self._at: dict[int, Place] = {}  # who has which request
        self._queues: dict[int, Queue] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._changed = asyncio.Event()  # a replica became ready
        self._ended = False
        self._before: list[dict[str, Any]] = []  # what replicas that died had done

    async def __aenter__(self) -> Replicas:
        try:
            import ray
        except ModuleNotFoundError:
            raise UserError("--replicas", "needs Ray", "Install moesaic[cluster].") from None
        self._ray = ray
        self._own = not ray.is_initialized()
        if self._own:
            await asyncio.to_thread(ray.init, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
        await asyncio.gather(*(self._start(place) for place in self.places))
        self._asking = asyncio.create_task(self._keep_asking())
        return self

    async def __aexit__(self, *problem: object) -> None:
        self._ended = True
        going = [*self._tasks, self._asking]
        for task in going:
            task.cancel()
        await asyncio.gather(*going, return_exceptions=True)
        for place in self.places:
            if place.actor is not None:
                self._ray.kill(place.actor)
        if self._own:
            await asyncio.to_thread(self._ray.shutdown)

    @property
    def alive(self) -> bool:
        return not self._ended and any(place.ready for place in self.places)

    def submit(self, requests: Sequence[Request], seconds: float | None = None) -> OutputStream:
        answers = OutputStream(self, requests, seconds)
        for request in requests:
            self._queues[request.number] = answers.queue
            self.engine.scheduler.requests[request.number] = request
            self._spawn(self._serve(request, answers.queue))
        self.open += len(requests)
        self._idle.clear()
        return answers

    async def call(self, note: Callable[[], Any]) -> Any:
        raise UserError("--replicas", "engines cannot be changed while they serve", "Start the server anew.")

    async def load_adapter(self, name: str, path: str) -> None:
        """In every replica, or in none that a request could reach: the front knows it last."""
        path = str(Path(path).resolve())
        loaded = load_adapter(self.engine.model, path, name)
        self.adapters[name] = path
        try:
            await asyncio.gather(*(p.actor.load_adapter.remote(name, path) for p in self.places if p.ready))
        except self._ray.exceptions.RayTaskError as error:
            self.adapters.pop(name, None)
            raise UserError("adapter", f"a replica cannot load {name!r} ({error.cause})") from None
        self.engine.adapters[name] = loaded

    async def unload_adapter(self, name: str) -> None:
        """Answers under way with it go on."""
        self.engine.unload_adapter(name)
        self.adapters.pop(name, None)
        await asyncio.gather(*(p.actor.unload_adapter.remote(name) for p in self.places if p.ready))

    async def ask(self) -> None:
        """Learn what the replicas have done, for the metrics. One that died is remembered as it last was."""
        for place in [place for place in self.places if place.ready]:
            try:
                place.told = await place.actor.facts.remote()
            except self._ray.exceptions.RayActorError:
                self._died(place)
        told = [place.told for place in self.places if place.told is not None] + self._before
        if not told:
            return
        engine, page_pool = self.engine, self.engine.page_pool

        def total(key: str) -> Any:
            return sum(facts[key] for facts in told)

        assert isinstance(page_pool, ToldBlocks)
        page_pool.told = total("pages_in_use") / max(1, total("pages"))
        page_pool.queries, page_pool.hits = total("queries"), total("hits")
        engine.scheduler.preemptions = total("preemptions")
        for key in ("steps", "prompt_tokens", "drafted_tokens", "accepted_tokens", "busy_seconds", "aborted"):
            setattr(engine.counts, key, total(key))
        engine.experts.counts = torch.tensor([facts["experts"] for facts in told], dtype=torch.int64).sum(0)

    async def _keep_asking(self) -> None:
        while True:
            await asyncio.sleep(ASKING)
            await self.ask()

    async def until_idle(self) -> None:
        await self._idle.wait()

    def forget(self, request: Request) -> None:
        del self._queues[request.number]
        self.engine.scheduler.requests.pop(request.number, None)
        self.open -= 1
        if not self.open:
            self._idle.set()

    def abort(self, request: Request) -> None:
        self.forget(request)
        if (place := self._at.get(request.number)) is not None and place.ready:
            place.actor.abort.remote(request.number)

    # One request

    async def _serve(self, request: Request, queue: Queue) -> None:
        """Have it answered by one replica after the other, until one lives long enough."""
        for _ in range(TRIES):
            place = await self._choose(request)
            if request.number not in self._queues:
                return  # it went away meanwhile
            owed = len(request.prompt) + (request.sampling.max_tokens or 0)
            place.owed += owed
            self._at[request.number] = place
            try:
                await self._follow(place, request, queue)
                return
            except self._ray.exceptions.RayActorError:
                self._died(place)
                if request.written or request.first_token is not None:
                    queue.put_nowait(ReplicaDied("the replica that wrote this answer died; ask again"))
                    return
            except self._ray.exceptions.RayTaskError as error:
                queue.put_nowait(error)
                return
            finally:
                place.owed -= owed
                del self._at[request.number]
        queue.put_nowait(ReplicaDied(f"{TRIES} replicas died at this request"))

    async def _follow(self, place: Place, request: Request, queue: Queue) -> None:
        place.seen.add(shared_with(request), request.prompt, place.size)
        options = {"num_returns": "streaming"}
        stream = place.actor.answer.options(**options).remote(request.number, plain_wish(self.engine, request))
        async for reference in stream:
            output = read_output(request, await reference, self.engine.clock())
            self.engine.counts.generated_tokens += len(output.tokens)
            if output.finish_reason is not None:
                self.engine.counts.finished += 1
            if self.on_outputs is not None:
                self.on_outputs([output])
            if request.number in self._queues:
                queue.put_nowait(output)
            if output.finish_reason is not None:
                return

    async def _choose(self, request: Request) -> Place:
        """The replica with the least to compute before this request is answered."""
        while not (ready := [place for place in self.places if place.ready]):
            self._changed.clear()
            await self._changed.wait()

        def work(place: Place) -> int:
            return (
                place.owed + len(request.prompt) - place.seen.tokens(shared_with(request), request.prompt, place.size)
            )

        return min(ready, key=lambda place: (work(place), len(place.seen.pages), place.number))

    # Replicas that come and go

    async def _start(self, place: Place) -> None:
        # Streams and aborts run side by side in one replica, on its event loop.
        kind = self._ray.remote(Replica)
        place.actor = kind.options(max_concurrency=10_000, **self._resources).remote(*self._begin)
        place.size = await place.actor.ready.remote()
        await asyncio.gather(*(place.actor.load_adapter.remote(*entry) for entry in self.adapters.items()))
        place.ready = True
        self._changed.set()

    def _died(self, place: Place) -> None:
        """Its cache is gone with it; begin it anew, once."""
        if not place.ready or self._ended:
            return
        logger.error("replica %d died; it is begun again", place.number)
        self.deaths += 1
        place.ready, place.seen = False, PrefixIndex()
        if place.told is not None:  # counters never go back, but its pages are gone
            self._before.append(place.told | {"pages_in_use": 0, "pages": 0})
            place.told = None
        self._spawn(self._restart(place))

    async def _restart(self, place: Place) -> None:
        for attempt in itertools.count():
            await asyncio.sleep(min(60.0, PAUSE * 2**attempt))
            try:
                await self._start(place)
                return
            except self._ray.exceptions.RayError as error:
                logger.error("replica %d cannot be begun again: %s", place.number, error)

    def _spawn(self, work: Any) -> None:
        self._tasks.add(task := asyncio.create_task(work))
        task.add_done_callback(self._tasks.discard)


def shared_with(request: Request) -> str:
    """Requests of which this differs share no pages."""
    return f"{request.adapter.name if request.adapter else ''}/{request.salt}"
