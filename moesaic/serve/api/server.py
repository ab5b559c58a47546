"""Run the application, and shut it down gracefully.

On SIGTERM (or Ctrl-C) the server reports that it is not ready, refuses new requests, and ends when those in flight
have. A second signal ends it at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import signal
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import uvicorn
from prometheus_client.core import Metric

from moesaic.errors import UserError
from moesaic.serve.api.app import make_app
from moesaic.serve.api.fingerprint import weights_fingerprint
from moesaic.serve.api.front import hosts_to_check
from moesaic.serve.api.metrics import Metrics
from moesaic.serve.api.middleware import HeaderTimeout
from moesaic.serve.api.service import Service, Settings
from moesaic.serve.api.worker_metrics import worker_metrics
from moesaic.serve.cluster.client import EngineClient
from moesaic.serve.core.engine import Engine
from moesaic.serve.core.engine_loop import EngineLoop
from moesaic.serve.core.grammar import prepare_grammars

# Between two requests on one connection. Clients close theirs after 5 s, proxies after 60 s; were the server the first
# to, it would drop requests that are just being sent.
KEEP_ALIVE_SECONDS = 75


class Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """`serve` handles signals itself."""
        yield


def listen(host: str, port: int) -> socket.socket:
    """A socket with its address taken, for the server to listen on; port 0 takes a free one."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise not_listening(f"{host}:{port}", error) from None
    return listener


def not_listening(address: str, error: OSError) -> UserError:
    reason = (error.strerror or str(error)).lower()
    taken = error.errno in (errno.EADDRINUSE, errno.EACCES)  # else it is no address of this machine
    remedy = f"Choose another with {'--port' if taken else '--host'}."
    return UserError(address, f"cannot be listened on ({reason})", remedy)


@dataclass(frozen=True)
class Served:
    """A model to serve: the engine that checks its requests, and what makes the loop that runs it, or its workers."""

    engine: Engine
    settings: Settings
    make_loop: Callable[..., Any] = EngineLoop

    def start(self) -> Service:
        def of_workers() -> Iterable[Metric]:
            return worker_metrics(loop) if isinstance(loop, EngineClient) else ()

        vllm_names = self.settings.metrics_names == "vllm"
        metrics = Metrics(lambda: loop.stats(), self.settings.name, vllm_names, of_workers)
        loop = self.make_loop(self.engine, on_outputs=metrics.watch)
        return Service(loop, self.settings, metrics)


def further_settings(first: Settings, name: str, directory: Path) -> Settings:
    """Of a further model: what is of the server is the same."""
    weights = weights_fingerprint(directory)
    return replace(first, name=name, aliases=(), fingerprint=weights, parser=None, chat_template=None, max_prompt=None)


async def serve(
    engine: Engine,
    settings: Settings,
    listener: socket.socket,
    *,
    drain_seconds: float = 60.0,
    ready: Callable[[Server, Service], None] | None = None,
    signals: bool = True,
    make_loop: Callable[..., Any] = EngineLoop,
    also: Sequence[Served] = (),
) -> None:
    """Serve until stopped: by a signal, or by `should_exit` of the server that `ready` is given. `make_loop` makes
    the loop that runs the engine, or its replicas; `also` are further models."""
    services = [one.start() for one in (Served(engine, settings, make_loop), *also)]
    service = services[0]
    bound = listener.getsockname()[0]
    hosts = hosts_to_check(bound, bool(settings.keys.hashes), settings.allowed_hosts)
    config = uvicorn.Config(
        make_app(services, hosts),
        log_level="warning",
        access_log=False,
        lifespan="off",
        http=HeaderTimeout,
        ws="none",
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=10,
    )
    server = Server(config)
    draining: list[asyncio.Task[None]] = []

    async def drain() -> None:
        for one in services:
            one.draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(drain_seconds):
                for one in services:
                    await one.loop.until_idle()
        server.should_exit = True

    def stop() -> None:
        if draining:
            # Requests are cut off on purpose: no tracebacks.
            logging.getLogger("uvicorn.error").disabled = True
            server.should_exit = server.force_exit = True
        else:
            draining.append(asyncio.create_task(drain()))

    if signals:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop)
    # The first structured output would wait for it: a second or two with a large vocabulary.
    preparing = [
        asyncio.create_task(asyncio.to_thread(prepare_grammars, one.engine.tokenizer, one.engine.model.config.vocab))
        for one in services
    ]
    async with contextlib.AsyncExitStack() as loops:
        for one in services:
            await loops.enter_async_context(one.loop)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started and not serving.done():
            await asyncio.sleep(0.005)
        if not server.started and isinstance(error := serving.exception(), OSError):
            # Another server took the address while the model was loaded: until one listens, several may bind it.
            raise not_listening(":".join(map(str, listener.getsockname()[:2])), error) from None
        if ready is not None and server.started:
            ready(server, service)
        try:
            await serving
        finally:
            await service.responses.close()  # of all models
    await asyncio.gather(*preparing)
