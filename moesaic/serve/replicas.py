"""Engines in several processes, on one machine or many, behind one front: `moesaic serve DIR --replicas N`, on Ray.

    async with Replicas(front_engine(directory), directory, count=2) as loop: ...      where an EngineLoop would be

The front tokenises, checks and routes; it holds no weights. A request goes where least is left to compute for it: what
the replica still owes to others, plus what of the prompt it has not in its cache (`serve/routing.py`). When a replica
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
from moesaic.model.compressed import open_checkpoint
from moesaic.model.directory import load, match
from moesaic.model.tokenizer import Tokenizer
from moesaic.model.transformer import Model
from moesaic.serve.engine import Engine
from moesaic.serve.grammar import Grammar
from moesaic.serve.loop import Answers, EngineLoop, Queue, ReplicaDied
from moesaic.serve.memory import SHARE, free_bytes
from moesaic.serve.request import Output, Request, Sampling, TokenLogprob
from moesaic.serve.routing import Seen

logger = logging.getLogger("moesaic.serve")

TRIES = 5  # of one request, before we think that it is what kills replicas
PAUSE = 1.0  # seconds before a replica that died is begun again; doubled while it keeps dying


def front_engine(directory: Path, **options: Any) -> Engine:
    """An engine that checks requests and computes nothing: its weights and its cache have shapes only."""
    source = open_checkpoint(directory)
    config, _ = match(source)
    with torch.device("meta"):
        model = Model(config)
    model.tokenizer = Tokenizer.from_files(source.files, source.place)
    engine = Engine(model, **options)
    engine.experts.counts = torch.zeros_like(engine.experts.counts, device="cpu")
    return engine


def with_replicas(
    directory: Path,
    count: int,
    cache_bytes: int | None,
    seed: int | None,
    weights: dict[str, Any],
    options: dict[str, Any],
) -> tuple[Engine, Callable[..., Replicas]]:
    """The front's engine, and what makes the loop behind it. Replicas on one machine share its memory for caches; on
    GPUs each has its own."""
    on_gpu = torch.cuda.is_available() and str(weights.get("device") or "cuda").startswith("cuda")
    if cache_bytes is None and not on_gpu:
        cache_bytes = int(free_bytes(torch.device("cpu")) * SHARE) // count
    front = front_engine(directory, cache_bytes=cache_bytes, seed=seed, most_requests=options["most_requests"] * count)
    make_loop = partial(
        Replicas,
        directory=directory,
        count=count,
        weights=weights,
        options=options | {"cache_bytes": cache_bytes},
        resources={"num_gpus": 1} if on_gpu else None,
    )
    return front, make_loop


class Replica:
    """What runs in the other process. Only plain data goes to and fro."""

    def __init__(self, directory: str, weights: dict[str, Any], options: dict[str, Any]) -> None:
        self.engine = Engine(load(directory, **weights), **options)
        self.loop = EngineLoop(self.engine)
        self.began = False
        self.answers: dict[int, Answers] = {}

    async def ready(self) -> int:
        """Tokens a page of its cache holds."""
        if not self.began:
            self.began = True
            await self.loop.__aenter__()
        return self.engine.blocks.size

    async def answer(self, number: int, wish: dict[str, Any]) -> Any:
        """All outputs of a request, as they come."""
        answers = self.answers[number] = self.loop.submit([read_wish(self.engine, wish)])
        try:
            async for output in answers:
                yield plain_output(output)
        finally:
            answers.close()
            del self.answers[number]

    async def abort(self, number: int) -> None:
        """End a request's answer; nobody reads what is still to come."""
        if (answers := self.answers.get(number)) is not None:
            (request,) = answers.requests
            self.engine.call(lambda: self.engine.abort(request))
            answers.queue.put_nowait(Output(request, [], "", [], "abort"))

    async def left(self) -> int:
        """Pages in use."""
        return self.engine.blocks.in_use


@dataclasses.dataclass
class Place:
    """One replica as the front knows it."""

    number: int
    actor: Any = None
    size: int = 16  # of its pages
    owed: int = 0  # tokens it has still to compute, at most
    seen: Seen = dataclasses.field(default_factory=Seen)
    ready: bool = False


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
        resources: dict[str, Any] | None = None,
        watch: Callable[[Sequence[Output]], None] | None = None,
    ) -> None:
        if count < 1:
            raise UserError("--replicas", f"must be at least 1, not {count}")
        self.engine = engine
        self.watch = watch
        self.open = 0
        self.deaths = 0
        self.places = [Place(number) for number in range(count)]
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
        return self

    async def __aexit__(self, *problem: object) -> None:
        self._ended = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for place in self.places:
            if place.actor is not None:
                self._ray.kill(place.actor)
        if self._own:
            await asyncio.to_thread(self._ray.shutdown)

    @property
    def alive(self) -> bool:
        return not self._ended and any(place.ready for place in self.places)

    def submit(self, requests: Sequence[Request], seconds: float | None = None) -> Answers:
        answers = Answers(self, requests, seconds)
        for request in requests:
            self._queues[request.number] = answers.queue
            self.engine.scheduler.requests[request.number] = request
            self._spawn(self._serve(request, answers.queue))
        self.open += len(requests)
        self._idle.clear()
        return answers

    async def call(self, note: Callable[[], Any]) -> Any:
        raise UserError("--replicas", "engines cannot be changed while they serve", "Start the server anew.")

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
        place.seen.add(request.salt, request.prompt, place.size)
        options = {"num_returns": "streaming"}
        stream = place.actor.answer.options(**options).remote(request.number, plain_wish(self.engine, request))
        async for reference in stream:
            output = read_output(request, await reference, self.engine.clock())
            self.engine.counts.generated_tokens += len(output.tokens)
            if output.finish_reason is not None:
                self.engine.counts.finished += 1
                self.engine.counts.prompt_tokens += len(request.prompt)
            if self.watch is not None:
                self.watch([output])
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
            return place.owed + len(request.prompt) - place.seen.tokens(request.salt, request.prompt, place.size)

        return min(ready, key=lambda place: (work(place), len(place.seen.pages), place.number))

    # Replicas that come and go

    async def _start(self, place: Place) -> None:
        # Streams and aborts run side by side in one replica, on its event loop.
        kind = self._ray.remote(Replica)
        place.actor = kind.options(max_concurrency=10_000, **self._resources).remote(*self._begin)
        place.size = await place.actor.ready.remote()
        place.ready = True
        self._changed.set()

    def _died(self, place: Place) -> None:
        """Its cache is gone with it; begin it anew, once."""
        if not place.ready or self._ended:
            return
        logger.error("replica %d died; it is begun again", place.number)
        self.deaths += 1
        place.ready, place.seen = False, Seen()
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


# Requests and outputs as plain data


def plain_wish(engine: Engine, request: Request) -> dict[str, Any]:
    sampling = {field.name: getattr(request.sampling, field.name) for field in dataclasses.fields(Sampling)}
    sampling["grammar"] = request.sampling.grammar.text if request.sampling.grammar is not None else None
    sampling["stop_tokens"] = sorted(request.sampling.stop_tokens)
    sampling["seed"] = None
    return {
        "prompt": list(request.prompt),
        "sampling": sampling,
        "seed": request.seed,  # siblings and all
        "priority": request.priority,
        "within": None if request.deadline is None else request.deadline - engine.clock(),
        "salt": request.salt,
        "adapter": request.adapter.name if request.adapter is not None else None,
        "embed": request.embed,
    }


def read_wish(engine: Engine, wish: dict[str, Any]) -> Request:
    sampling = dict(wish["sampling"])
    sampling["grammar"] = Grammar(sampling["grammar"]) if sampling["grammar"] is not None else None
    sampling["stop_tokens"] = frozenset(sampling["stop_tokens"])
    request = engine.request(
        wish["prompt"],
        Sampling(**sampling),
        priority=wish["priority"],
        deadline=None if wish["within"] is None else engine.clock() + wish["within"],
        salt=wish["salt"],
        adapter=wish["adapter"],
        embed=wish["embed"],
    )
    request.seed = wish["seed"]
    return request


def plain_output(output: Output) -> dict[str, Any]:
    request = output.request
    ended = output.finish_reason is not None
    return {
        "tokens": output.tokens,
        "text": output.text,
        "logprobs": [tuple(one) for one in output.logprobs],
        "finish_reason": output.finish_reason,
        "cached": request.cached,
        "versions": request.versions[-len(output.tokens) :] if output.tokens else [],
        "preemptions": request.preemptions,
        "prompt_logprobs": [one and tuple(one) for one in request.prompt_logprobs] if ended else [],
        "routes": {layer: torch.cat(rows).tolist() for layer, rows in request.routes.items()} if ended else {},
        "hidden": request.hidden_D.tolist() if ended and request.hidden_D is not None else None,
    }


def read_output(request: Request, told: dict[str, Any], now: float) -> Output:
    """Bring the front's request to where the replica's is."""
    logprobs = [TokenLogprob(*one) for one in told["logprobs"]]
    request.tokens.extend(told["tokens"])
    request.answer.extend(logprobs)
    request.versions.extend(told["versions"])
    request.cached, request.preemptions = told["cached"], told["preemptions"]
    request.prompt_logprobs = [one and TokenLogprob(*one) for one in told["prompt_logprobs"]]
    request.routes = {layer: [torch.tensor(rows)] for layer, rows in told["routes"].items()}
    request.hidden_D = None if told["hidden"] is None else torch.tensor(told["hidden"])
    request.first_token = now if request.first_token is None else request.first_token
    request.last_token = now
    request.finish_reason = told["finish_reason"]
    return Output(request, told["tokens"], told["text"], logprobs, told["finish_reason"])
