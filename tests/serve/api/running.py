"""A real server on a free port, in a thread of the test, which must leave nothing behind."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import openai

from moesaic.serve.api.server import Served, Server, listen, serve
from moesaic.serve.api.service import Service, Settings
from moesaic.serve.core.engine import Engine
from moesaic.serve.core.request import Output
from tests.waiting import PATIENCE, until

NAME = "tiny"


@dataclass
class Hold:
    """Holds an engine once it has generated so many tokens, so that a test can do something in the middle."""

    tokens: float = math.inf
    changed: threading.Condition = field(default_factory=threading.Condition)

    def until(self, tokens: float) -> None:
        """Hold it later."""
        with self.changed:
            self.tokens = tokens
            self.changed.notify_all()

    def release(self) -> None:
        self.until(math.inf)

    def over(self, engine: Engine) -> None:
        """Every step of the engine waits for its turn."""
        step = engine.step

        def held() -> list[Output]:
            with self.changed:
                self.changed.wait_for(lambda: engine.counts.generated_tokens < self.tokens, PATIENCE)
            return step()

        engine.step = held  # type: ignore[method-assign]


@dataclass
class Running:
    url: str
    service: Service
    server: Server
    events: asyncio.AbstractEventLoop
    hold: Hold

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
def running(
    engine: Engine, *, hold: float = math.inf, also: dict[str, Engine] | None = None, **settings: Any
) -> Iterator[Running]:
    """The engine is held after `hold` tokens, until the test lets it go on; `also` are further models, by name."""
    holding = Hold(hold)
    holding.over(engine)
    listener = listen("127.0.0.1", 0)
    found: list[Running] = []
    started = threading.Event()

    def ready(server: Server, service: Service) -> None:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        found.append(Running(url, service, server, asyncio.get_running_loop(), holding))
        started.set()

    def work() -> None:
        try:
            own = Settings(**{"name": NAME} | settings)
            others = [Served(other, replace(own, name=name, aliases=())) for name, other in (also or {}).items()]
            asyncio.run(serve(engine, own, listener, ready=ready, signals=False, also=others))
        finally:
            started.set()

    thread = threading.Thread(target=work)
    thread.start()
    started.wait()
    try:
        yield found[0]
        holding.release()
        found[0].until(lambda: found[0].idle)
        found[0].until(lambda: not found[0].tasks())
    finally:
        holding.release()
        found[0].server.should_exit = True
        thread.join(PATIENCE)
        assert not thread.is_alive()
