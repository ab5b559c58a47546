"""A response that is generated whether anybody waits for it or not: its client asks for it later, listens to it from
any event on, or cancels it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from moesaic.serve.api.errors import api_error
from moesaic.serve.api.rate_limits import CALLER
from moesaic.serve.api.responses.generation import Responses
from moesaic.serve.api.responses.store import ResponseStore, Stored
from moesaic.serve.core.engine_loop import OutputStream


class BackgroundRun:
    """Its events are kept where a stream was asked for: the number of an event is its place among them."""

    def __init__(self, generation: Responses, outputs: OutputStream, store: ResponseStore, stored: Stored) -> None:
        self.generation: Responses | None = generation
        self.outputs: OutputStream | None = outputs
        self.store = store
        self.stored = stored
        self.done = False
        self._more = asyncio.Event()  # replaced at every news
        stored.run = self
        self._caller = CALLER.get()
        if self._caller is not None:
            self._caller.stay()
        self.task = asyncio.create_task(self._generate(generation, outputs), name="background response")

    def snapshot(self) -> dict[str, Any]:
        assert self.generation is not None
        return self.generation.response().model_dump()

    async def cancel(self) -> None:
        """Its pages are free when this returns."""
        self.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.task
        if self.generation is not None:  # before it had begun
            self.generation.cancel()
            self._end(self.generation)

    async def follow(self, at: int = 0) -> AsyncIterator[str]:
        """The events from that number on, those to come included."""
        events = self.stored.events
        while True:
            news = self._more
            if at < len(events):
                said, at = "".join(events[at:]), len(events)
                yield said
            elif self.done:
                return
            else:
                await news.wait()

    async def _generate(self, generation: Responses, outputs: OutputStream) -> None:
        try:
            async for events in generation.numbered(outputs):
                if self.stored.streamed and events:
                    self.stored.events += events
                    self._tell()
        except asyncio.CancelledError:
            generation.cancel()
        except Exception as error:
            failed = generation.failed(api_error(error))
            if self.stored.streamed:
                self.stored.events.append(failed)
        finally:
            self._end(generation)

    def _end(self, generation: Responses) -> None:
        if self.outputs is not None:
            self.outputs.close()
        self.stored.content = generation.response().model_dump_json().encode()
        self.stored.items += tuple(item["id"] for item in generation.items.items)
        self.generation = self.outputs = None  # all its tokens with them
        self.done = True
        if self._caller is not None:
            self._caller.end()
        self.store.resize(self.stored)
        self._tell()

    def _tell(self) -> None:
        self._more.set()
        self._more = asyncio.Event()
