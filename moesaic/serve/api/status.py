"""The state of the server: /health, /ready, /version, /metrics, and /live for the web page."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter
from fastapi.responses import PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel

import moesaic
from moesaic.serve.api.errors import ERRORS, ApiError
from moesaic.serve.api.metrics_of_all import registry_of
from moesaic.serve.api.service import Service
from moesaic.serve.api.stream import EVENTS, EventStream, event

LIVE_SECONDS = 0.5


class Status(BaseModel):
    status: str


class Load(BaseModel):
    server_load: int


class Version(BaseModel):
    version: str


class Live(BaseModel):
    running: int
    waiting: int
    cache_share: float
    tokens_per_second: float
    ttft_seconds: float | None
    experts: dict[str, list[int]]


def router(service: Service) -> APIRouter:
    routes = APIRouter(tags=["status"])

    @routes.get("/health", responses=ERRORS)
    async def health() -> Status:
        """Whether the server is alive. It is also while workers are being restarted."""
        if not all(one.loop.alive for one in service.all):
            raise ApiError(503, "the engine has stopped", code="engine_stopped")
        return Status(status="ok")

    @routes.get("/ping", responses=ERRORS)
    @routes.post("/ping", responses=ERRORS, include_in_schema=False)
    async def ping() -> Status:
        """The same, by the name some clouds ask for it."""
        return await health()

    @routes.get("/load", responses=ERRORS)
    async def load() -> Load:
        """How many requests are open, as vLLM says it."""
        return Load(server_load=sum(one.loop.open for one in service.all))

    @routes.get("/ready", responses=ERRORS)
    async def ready() -> Status:
        """Whether requests may be sent here: a worker would begin at once with them."""
        for one in service.all:
            one.check_ready()
        return Status(status="ready")

    @routes.get("/version")
    async def version() -> Version:
        return Version(version=moesaic.__version__)

    text = {"content": {"text/plain": {"schema": {"type": "string"}}}, "description": "Prometheus' text format."}

    @routes.get("/metrics", response_class=PlainTextResponse, responses=ERRORS | {200: text})
    async def metrics() -> Response:
        """For Prometheus."""
        found = generate_latest(registry_of([one.metrics for one in service.all]))
        return Response(found, media_type=CONTENT_TYPE_LATEST)

    @routes.get("/live", responses=ERRORS)
    async def live() -> Live:
        """What the page shows of the engine now."""
        return Live(**service.metrics.live())

    stream: dict[str, Any] = {"content": EVENTS, "description": "Events."}

    @routes.get("/live/stream", response_class=Response, responses=ERRORS | {200: stream}, include_in_schema=False)
    async def live_stream() -> Response:
        """The same, twice a second, until the client leaves."""

        async def events() -> AsyncIterator[str]:
            while not service.draining:
                yield event(service.metrics.live())
                await asyncio.sleep(LIVE_SECONDS)

        return EventStream(events())

    return routes
