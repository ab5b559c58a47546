"""Server-sent events, and the watch for clients that go away: whatever was being done for them is cancelled."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import Response
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

from moesaic.serve.api.errors import api_error

Result = TypeVar("Result")

DONE = "data: [DONE]\n\n"
HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}  # nothing on the way shall collect the events


def event(data: BaseModel | dict[str, Any], name: str | None = None) -> str:
    """One event of a stream."""
    text = data.model_dump_json(exclude_unset=True) if isinstance(data, BaseModel) else json.dumps(data)
    return f"event: {name}\ndata: {text}\n\n" if name else f"data: {text}\n\n"


class Stalled(Exception):
    """The client does not read what it asked for."""


class EventStream(Response):
    """Sends events as they are made. An error on the way is the last event; a client that leaves, or does not take an
    event for `patience` seconds, ends it all."""

    media_type = "text/event-stream"
    patience = 60.0

    def __init__(self, events: AsyncIterator[str], ending: str = "", close: Callable[[], None] | None = None) -> None:
        self.events = events
        self.close = close
        self.ending = ending
        self.status_code = 200
        self.background = None
        self.init_headers(HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self._send(send))
        except Stalled:
            pass  # left unfinished, the connection is closed by the server
        finally:
            if self.close is not None:
                self.close()

    async def _send(self, send: Send) -> None:
        async def put(text: str, more: bool = True) -> None:
            try:
                async with asyncio.timeout(self.patience):
                    await send({"type": "http.response.body", "body": text.encode(), "more_body": more})
            except TimeoutError:
                raise Stalled from None

        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async for text in self.events:
                await put(text)
        except Stalled:
            raise
        except Exception as error:
            await put(event(api_error(error).answer))
        await put(self.ending, more=False)


async def while_connected(request: Request, work: Coroutine[Any, Any, Result]) -> Result | Response:
    """The result of some work, which is cancelled if the client goes away; nobody reads what is returned then."""
    result = await unless_gone(request.receive, work)
    return Response(status_code=499) if result is None else result


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result | None:
    """The result of some work; None, and the work is cancelled, if the client goes away before."""
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
