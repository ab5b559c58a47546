"""A real server on a free port, in a thread of the test, which must leave nothing behind."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import openai

from moesaic.serve.api.server import Server, listen, serve
from moesaic.serve.api.service import Service, Settings
from moesaic.serve.core.engine import Engine
from tests.waiting import PATIENCE, until

NAME = "tiny"


@dataclass
class Running:
    url: str
    service: Service
    server: Server
    events: asyncio.AbstractEventLoop

    @property
    def engine(self) -> Engine:
        return self.service.engine

    def client(self, key: str = "none", **settings: Any) -> openai.OpenAI:
        # Reading certificates, which nothing here needs, would take longer than most tests.
        plain = openai.DefaultHttpxClient(verify=False)
        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=PATIENCE, http_client=plain, **settings
        )

    def http(self, **settings: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=PATIENCE, verify=False, **settings)

    def post(self, path: str, body: Any, **settings: Any) -> httpx.Response:
        with self.http() as client:
            return client.post(path, json=body, **settings)

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait for something that another thread will bring about."""
        until(condition)

    @property
    def idle(self) -> bool:
        """Whether nothing of any request is left: no place in the queue, no page, no task."""
        loop, scheduler = self.service.loop, self.engine.scheduler
        return not (
            loop.open
            or loop._driver.open
            or scheduler.requests
            or scheduler.stopped
            or self.engine.inbox
            or self.engine.page_pool.in_use
        )

    def tasks(self) -> list[str]:
        """What the event loop is busy with, but for the server itself."""
        own = ("serve", "main_loop", "drain")
        names = [task.get_coro().__qualname__ for task in asyncio.all_tasks(self.events)]
        return [name for name in names if not name.endswith(own)]


@contextmanager
def running(engine: Engine, *, slow: float = 0.0, **settings: Any) -> Iterator[Running]:
    """`slow` seconds are lost before every step, so that a test can do something meanwhile."""
    if slow:
        step = engine.step
        engine.step = lambda: (time.sleep(slow), step())[1]  # type: ignore[method-assign]
    listener = listen("127.0.0.1", 0)
    found: list[Running] = []
    started = threading.Event()

    def ready(server: Server, service: Service) -> None:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        found.append(Running(url, service, server, asyncio.get_running_loop()))
        started.set()

    def work() -> None:
        try:
            asyncio.run(serve(engine, Settings(**{"name": NAME} | settings), listener, ready=ready, signals=False))
        finally:
            started.set()

    thread = threading.Thread(target=work)
    thread.start()
    started.wait()
    try:
        yield found[0]
        found[0].until(lambda: found[0].idle)
        found[0].until(lambda: not found[0].tasks())
    finally:
        found[0].server.should_exit = True
        thread.join(PATIENCE)
        assert not thread.is_alive()
