"""A server with workers, in a thread of the test."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import openai

from moesaic.serve.api.server import Server, listen, serve
from moesaic.serve.api.service import Service, Settings
from moesaic.serve.cluster.client import EngineClient
from moesaic.serve.cluster.launch import MakeLoop
from moesaic.serve.core.engine import Engine
from tests.waiting import PATIENCE, until

NAME = "tiny"


@dataclass
class Served:
    url: str
    service: Service
    events: asyncio.AbstractEventLoop

    @property
    def loop(self) -> EngineClient:
        assert isinstance(self.service.loop, EngineClient)
        return self.service.loop

    def client(self, key: str = "none") -> openai.OpenAI:
        plain = openai.DefaultHttpxClient(verify=False)
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=PATIENCE, http_client=plain)

    def http(self, **settings: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=PATIENCE, verify=False, **settings)

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """On the server's event loop."""
        return asyncio.run_coroutine_threadsafe(work, self.events).result(PATIENCE)

    def until(self, condition: Callable[[], object]) -> None:
        until(condition)


@contextmanager
def served(launched: tuple[Engine, MakeLoop], **settings: Any) -> Iterator[Served]:
    engine, make_loop = launched
    listener = listen("127.0.0.1", 0)
    found: list[tuple[Server, Served]] = []
    started = threading.Event()

    def ready(server: Server, service: Service) -> None:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        found.append((server, Served(url, service, asyncio.get_running_loop())))
        started.set()

    def work() -> None:
        try:
            chosen = Settings(**{"name": NAME} | settings)
            asyncio.run(serve(engine, chosen, listener, ready=ready, signals=False, make_loop=make_loop))
        finally:
            started.set()

    thread = threading.Thread(target=work)
    thread.start()
    started.wait()
    server, one = found[0]
    try:
        yield one
    finally:
        server.should_exit = True
        thread.join(PATIENCE)
        assert not thread.is_alive()
