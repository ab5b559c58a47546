"""Calls that change the server while it serves, for those who have an admin key: workers, weights, drain, sleep.

They exist only where the server was started with admin keys. A change goes on in the background, one at a time;
GET /admin/workers says how it goes.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field

from moesaic.errors import UserError
from moesaic.serve.api.errors import ERRORS, ApiError
from moesaic.serve.api.fingerprint import weights_fingerprint
from moesaic.serve.api.schema.sampling import RequestModel
from moesaic.serve.api.service import Service
from moesaic.serve.cluster.client import EngineClient
from moesaic.serve.cluster.life_cycle import Busy, LifeCycle
from moesaic.serve.cluster.sleep import PARTS, Mode, Sleep
from moesaic.serve.cluster.worker import WorkerHandle

PREFIX = "/admin/"
PATHS = frozenset({"/sleep", "/wake_up", "/is_sleeping"})  # as vLLM calls them


class RankCard(BaseModel):
    rank: int
    pid: int
    weights_bytes: int = 0
    cache_bytes: int = 0
    peak_bytes: int = 0
    sent_bytes: int = 0


class WorkerCard(BaseModel):
    worker: int
    state: Literal["starting", "ready", "draining", "dead", "ended"]
    role: str
    layout: str
    directory: str
    open_requests: int
    deaths: int
    problem: str = Field(description="What kept it from starting, if anything did.")
    ranks: list[RankCard]


class ChangeCard(BaseModel):
    what: str
    state: Literal["running", "done", "failed"]
    problem: str


class Workers(BaseModel):
    workers: list[WorkerCard]
    change: ChangeCard | None = Field(description="The latest change.")
    draining: bool


class Scale(RequestModel):
    workers: int = Field(ge=1, le=4096)
    role: str = ""


class Weights(RequestModel):
    directory: str = Field(min_length=1, max_length=4096, description="A model directory that workers can read.")


class Accepted(BaseModel):
    status: str


class Sleeping(BaseModel):
    is_sleeping: bool


def router(service: Service) -> APIRouter:
    routes = APIRouter(tags=["admin"])
    loop: Any = service.loop
    life = LifeCycle(loop, service.settings.drain_seconds) if isinstance(loop, EngineClient) else None
    sleep = Sleep(loop, service.settings.drain_seconds) if isinstance(loop, EngineClient) else None

    def cycle() -> LifeCycle:
        if life is None:
            message = "the engine runs in the server's own process. Start the server with --replicas 1"
            raise ApiError(409, message, code="no_workers")
        return life

    def begin(what: str, work: Any) -> Accepted:
        try:
            cycle().begin(what, work)
        except Busy as error:
            raise ApiError(409, error.problem, code="busy") from None
        return Accepted(status=what)

    @routes.get("/admin/workers", responses=ERRORS)
    async def workers() -> Workers:
        """Every worker, and how the latest change goes."""
        change = None if life is None or life.change is None else ChangeCard(**vars(life.change))
        cards = [card(worker) for worker in loop.workers] if life is not None else []
        return Workers(workers=cards, change=change, draining=service.draining or service.held)

    @routes.post("/admin/scale", status_code=202, responses=ERRORS)
    async def scale(body: Scale) -> Accepted:
        """Have so many workers: new ones are started, or some finish what they have and end."""
        return begin(f"scale to {body.workers}", cycle().scale(body.workers, body.role))

    @routes.post("/admin/workers/{number}/drain", status_code=202, responses=ERRORS)
    async def drain_worker(number: int) -> Accepted:
        """Take one worker out: it finishes what it has, and ends."""
        return begin(f"drain worker {number}", cycle().remove(number))

    @routes.post("/admin/weights", status_code=202, responses=ERRORS)
    async def weights(body: Weights) -> Accepted:
        """Serve other weights of the same model, worker by worker. Requests finish with those they began with."""
        directory = Path(body.directory)
        if not directory.is_dir():
            raise ApiError(400, "there is no such directory", param="directory", code="invalid_value")
        try:
            await asyncio.to_thread(cycle().check_weights, directory)
        except UserError as error:
            raise ApiError(400, error.problem, param="directory", code="invalid_value") from None

        async def change() -> None:
            await cycle().update_weights(directory)
            service.fingerprint = service.fingerprint_of(await asyncio.to_thread(weights_fingerprint, directory))

        return begin(f"weights of {directory}", change())

    @routes.post("/sleep", responses=ERRORS)
    async def fall_asleep(
        level: Annotated[Literal["1", "2"], Query(description="1: weights stay in host memory; 2: nowhere.")] = "1",
        mode: Annotated[Mode, Query(description="Open requests finish, fail, or go on after waking.")] = "wait",
    ) -> Accepted:
        """End the model's workers, which frees their memory; new requests get 503 until it wakes."""
        life = cycle()
        if life.change is not None and life.change.state == "running":
            raise ApiError(409, f"another change is under way ({life.change.what})", code="busy")
        assert sleep is not None
        service.sleeping = service.metrics.sleeping = int(level)
        await sleep.begin(int(level), mode)
        return Accepted(status="sleeping")

    @routes.post("/wake_up", responses=ERRORS)
    async def wake_up(
        tags: Annotated[
            list[Literal["weights", "kv_cache"]] | None, Query(description="What to wake; default: all.")
        ] = None,
    ) -> Accepted:
        """Start the workers again; returns when they are ready, or at once if something is left to wake."""
        cycle()
        assert sleep is not None
        await sleep.wake(frozenset(tags or PARTS))
        service.sleeping = service.metrics.sleeping = sleep.level
        return Accepted(status="sleeping" if sleep.level else "ready")

    @routes.get("/is_sleeping", responses=ERRORS)
    async def is_sleeping() -> Sleeping:
        return Sleeping(is_sleeping=service.sleeping > 0)

    @routes.post("/admin/drain", responses=ERRORS)
    async def drain() -> Accepted:
        """Take no new requests, and say so at /ready; those that are open finish."""
        service.held = True
        return Accepted(status="draining")

    @routes.post("/admin/resume", responses=ERRORS)
    async def resume() -> Accepted:
        """Take requests again."""
        service.held = False
        return Accepted(status="ready")

    return routes


def card(worker: WorkerHandle) -> WorkerCard:
    pids = worker.ready.pids if worker.ready is not None else ()
    stats = {one.rank: one for one in worker.rank_stats}
    ranks = []
    for rank, pid in enumerate(pids):
        held = stats.get(rank)
        sizes = {} if held is None else {
            "weights_bytes": held.weights, "cache_bytes": held.cache,
            "peak_bytes": held.peak, "sent_bytes": held.sent,
        }  # fmt: skip
        ranks.append(RankCard(rank=rank, pid=pid, **sizes))
    return WorkerCard(
        worker=worker.number,
        state=worker.state.value,
        role=worker.options.role,
        layout=worker.options.layout,
        directory=str(worker.options.directory),
        open_requests=len(worker.open),
        deaths=worker.deaths,
        problem=worker.problem,
        ranks=ranks,
    )
