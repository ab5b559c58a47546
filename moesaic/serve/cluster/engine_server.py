"""An engine behind messages: what runs in a worker's first rank, a process or an actor of Ray.

    server = EngineServer(options, address, send)      `send` takes what goes to the front
    threading.Thread(target=..., args=(server.take,))  whoever brings messages hands them to `take`
    server.run()                                       loads the model, says Ready, steps while it has requests

What a step gives all its requests travels in one message. Pings are answered beside the engine's thread, from the first
moment on: loading and long steps are no silence.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from moesaic.serve.cluster.kinds import EngineKind, engine_kind
from moesaic.serve.cluster.messages import (
    Abort,
    Add,
    Ask,
    EngineOptions,
    Failed,
    FromEngine,
    Handed,
    Lost,
    Outputs,
    Ping,
    Pong,
    Ready,
    Reply,
    ToEngine,
)
from moesaic.serve.cluster.serialization import deserialize_request, serialize_output
from moesaic.serve.core.driver import EngineDriver, EngineLost
from moesaic.serve.core.engine import Engine
from moesaic.serve.core.request import Request
from moesaic.serve.core.stats import EngineStats
from moesaic.serve.group.rank_state import RankStats
from moesaic.serve.pages.remote import Origin
from moesaic.serve.pages.server import PageServer, page_server

logger = logging.getLogger("moesaic.serve")


class EngineServer:
    """The thread of `run` steps the engine; another calls `take`, which puts what messages ask for into its inbox."""

    kind: EngineKind
    engine: Engine
    driver: EngineDriver[int]
    pages: PageServer | None

    def __init__(self, options: EngineOptions, address: str, send: Callable[[FromEngine], None]) -> None:
        self.options, self.address = options, address
        self.send = send
        self.requests: dict[int, Request] = {}
        self.wake = threading.Event()
        self.started = False
        self.ended = False

    def run(self) -> None:
        """Until it is told to end, the front has gone, or a group of ranks has lost one."""
        try:
            self.kind = engine_kind(self.options)
            self.engine = self.kind.open(self.options, self.address)
            self.engine.warm_up()
        except Exception as error:
            with contextlib.suppress(OSError):
                self.send(Failed.by(error))
            return
        self.engine.wake = self.wake.set
        self.driver = EngineDriver(self.engine)
        self.pages = page_server(self.engine)
        self.started = True
        held = self.ranks()[0]
        try:
            self.send(Ready(self.engine.cache.pages, self.engine.page_pool.size, held.weights + held.cache))
            self._serve()
            self.kind.close(self.engine)
        except OSError:
            pass  # the front has gone
        except EngineLost as error:  # its requests go on where the front sends them
            logger.error("the engine is lost: %s", error)

    def _serve(self) -> None:
        for step in self.driver.steps(self.wake, lambda: self.ended):
            if step.error is not None:
                self._lose(step.lost, step.error, again=True)
            elif step.outputs:
                self.send(Outputs([(number, serialize_output(output)) for number, output in step.outputs]))
                for number, output in step.outputs:
                    if output.finish_reason is not None:
                        self.requests.pop(number, None)
                    if output.finish_reason == "handed":
                        self.send(Handed(number, self._origin(output.request)))

    def _origin(self, request: Request) -> Origin:
        assert self.pages is not None and request.lease is not None
        return Origin(self.pages.ranks(), request.lease[0])

    def _lose(self, numbers: list[int], error: BaseException, again: bool) -> None:
        for number in numbers:
            self.requests.pop(number, None)
        self.send(Lost(numbers, f"{type(error).__name__}: {error}", again))

    # On the thread that brings messages

    def take(self, message: ToEngine) -> None:
        if isinstance(message, Ping):
            self.send(Pong(0, self.started and self.engine.working, self.engine.counts.steps if self.started else 0))
            return
        if isinstance(message, Add):
            for number, data in message.requests:
                self.engine.call(partial(self._add, number, data))
        elif isinstance(message, Abort):
            self.engine.call(partial(self._abort, message.number))
        elif isinstance(message, Ask):
            answer = partial(getattr(self, message.method), *message.arguments)
            self.engine.call(partial(self._reply, message.ask, answer))
        else:
            self.ended = True
        self.wake.set()

    # On the engine's thread, between two steps

    def _add(self, number: int, data: dict[str, Any]) -> None:
        try:
            request = self.requests[number] = deserialize_request(self.engine, data)
            self.driver.add(request, number)
        except BaseException as error:
            logger.error("the engine could not add a request", exc_info=error)
            self._lose([number], error, again=False)

    def _abort(self, number: int) -> None:
        if (request := self.requests.pop(number, None)) is not None:
            self.driver.abort(request)

    def _reply(self, ask: int, function: Callable[[], Any]) -> None:
        try:
            self.send(Reply(ask, function()))
        except OSError:
            raise
        except Exception as error:
            self.send(Reply(ask, None, error))

    def load_adapter(self, name: str, path: str) -> None:
        self.engine.load_adapter(name, path)

    def unload_adapter(self, name: str) -> None:
        self.engine.unload_adapter(name)

    def stats(self) -> EngineStats:
        return EngineStats.of(self.engine)

    def ranks(self) -> list[RankStats]:
        return self.kind.rank_stats(self.engine)
