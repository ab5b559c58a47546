"""An engine in a process of its own: it loads the model, captures what it will run, then steps while it has requests.

    process = EngineProcess.start(EngineOptions(directory, load_options, engine_options, adapters))
    ready = process.wait()          what the frontend has to know of it
    process.send(Add([(number, serialize_request(engine, request))]))
    process.pipe.recv()             Outputs of a whole step, Lost, Reply

What a step gives all its requests travels in one message. When the pipe is closed at the other end, the process ends.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

from moesaic.errors import UserError
from moesaic.model.directory import load
from moesaic.serve.cluster.replica import deserialize_request, serialize_output
from moesaic.serve.core.driver import EngineDriver
from moesaic.serve.core.engine import Engine
from moesaic.serve.core.engine_loop import RETRY
from moesaic.serve.core.request import Request
from moesaic.serve.core.stats import EngineStats

logger = logging.getLogger("moesaic.serve")

SWITCH_SECONDS = 0.001  # until a thread that waits for Python gets it: messages wait for it, and streams
END_SECONDS = 10.0  # for a process to end before it is killed


@dataclass
class EngineOptions:
    """`adapters` are directories by name."""

    directory: Path
    load_options: dict[str, Any] = field(default_factory=dict)
    engine_options: dict[str, Any] = field(default_factory=dict)
    adapters: dict[str, str] = field(default_factory=dict)


# Messages to the engine. Requests go by the numbers they have at the frontend.


class Add(NamedTuple):
    requests: list[tuple[int, dict[str, Any]]]


class Abort(NamedTuple):
    number: int


class Ask(NamedTuple):
    """A call of `_Server`'s method of that name, for a Reply."""

    ask: int
    method: str
    arguments: tuple[Any, ...] = ()


class End(NamedTuple):
    pass


# Messages from the engine


class Ready(NamedTuple):
    pages: int  # of its KV cache
    page_size: int


class Outputs(NamedTuple):
    """Of one step, as `serialize_output` writes them."""

    outputs: list[tuple[int, tuple[Any, ...]]]


class Lost(NamedTuple):
    """Requests that the engine gave up, and why."""

    numbers: list[int]
    problem: str


class Reply(NamedTuple):
    ask: int
    result: Any = None
    problem: Exception | None = None


class EngineProcess:
    """Seen from the frontend."""

    def __init__(self, process: BaseProcess, pipe: Connection) -> None:
        self.process = process
        self.pipe = pipe

    @classmethod
    def start(cls, options: EngineOptions) -> EngineProcess:
        context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
        ours, theirs = context.Pipe()
        process = context.Process(target=_run, args=(options, theirs), name="moesaic engine", daemon=True)
        process.start()
        theirs.close()  # so that the end of the process ends what is read from it
        return cls(process, ours)

    def wait(self) -> Ready:
        """Until it is ready to serve; what keeps it from that is raised here."""
        try:
            found = self.pipe.recv()
        except EOFError:
            self.process.join()
            problem = f"ended as it started (exit code {self.process.exitcode})"
            raise UserError("the engine's process", problem, "Is there memory enough for the model?") from None
        if isinstance(found, Exception):
            raise found
        assert isinstance(found, Ready)
        return found

    def send(self, message: Add | Abort | Ask | End) -> None:
        """To one that has died goes nothing: whoever reads from it will notice."""
        with contextlib.suppress(OSError):
            self.pipe.send(message)

    def end(self) -> None:
        self.send(End())
        self.process.join(END_SECONDS)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


# In the process


def _run(options: EngineOptions, pipe: Connection) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # they mean the server, which lets requests finish
        signal.signal(number, signal.SIG_IGN)
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        engine = Engine(load(options.directory, **options.load_options), **options.engine_options)
        for name, path in options.adapters.items():
            engine.load_adapter(name, path)
        engine.warm_up()
    except Exception as error:
        with contextlib.suppress(OSError):
            pipe.send(error if isinstance(error, UserError) else RuntimeError(f"{type(error).__name__}: {error}"))
        return
    with contextlib.suppress(OSError):  # the frontend has gone
        pipe.send(Ready(engine.cache.pages, engine.page_pool.size))
        _Server(engine, pipe).run()


class _Server:
    """The main thread steps the engine, another one reads messages and puts what they ask for into its inbox."""

    def __init__(self, engine: Engine, pipe: Connection) -> None:
        self.engine, self.pipe = engine, pipe
        self.driver: EngineDriver[int] = EngineDriver(engine)
        self.requests: dict[int, Request] = {}
        self.wake = threading.Event()
        self.ended = False

    def run(self) -> None:
        threading.Thread(target=self._read, name="messages", daemon=True).start()
        while not self.ended:
            self.wake.clear()
            if not self.engine.working:
                self.wake.wait()
                continue
            step = self.driver.step()
            if step.error is not None:
                logger.error("the engine failed; its requests are given up", exc_info=step.error)
                self._lose(step.lost, step.error)
            elif step.outputs:
                self.pipe.send(Outputs([(number, serialize_output(output)) for number, output in step.outputs]))
                for number, output in step.outputs:
                    if output.finish_reason is not None:
                        self.requests.pop(number, None)
            elif step.idle:
                self.wake.wait(RETRY)

    def _lose(self, numbers: list[int], error: BaseException) -> None:
        for number in numbers:
            self.requests.pop(number, None)
        self.pipe.send(Lost(numbers, f"{type(error).__name__}: {error}"))

    # On the thread that reads

    def _read(self) -> None:
        while not self.ended:
            try:
                message = self.pipe.recv()
            except (EOFError, OSError):
                message = End()
            self._take(message)
            self.wake.set()

    def _take(self, message: Any) -> None:
        call = self.engine.call
        if isinstance(message, Add):
            for number, data in message.requests:
                call(partial(self._add, number, data))
        elif isinstance(message, Abort):
            call(partial(self._abort, message.number))
        elif isinstance(message, Ask):
            call(partial(self._reply, message.ask, partial(getattr(self, message.method), *message.arguments)))
        else:
            self.ended = True

    # On the engine's thread, between two steps

    def _add(self, number: int, data: dict[str, Any]) -> None:
        try:
            request = self.requests[number] = deserialize_request(self.engine, data)
            self.driver.add(request, number)
        except BaseException as error:
            logger.error("the engine could not add a request", exc_info=error)
            self._lose([number], error)

    def _abort(self, number: int) -> None:
        if (request := self.requests.pop(number, None)) is not None:
            self.driver.abort(request)

    def _reply(self, ask: int, function: Callable[[], Any]) -> None:
        try:
            self.pipe.send(Reply(ask, function()))
        except OSError:
            raise
        except Exception as error:
            self.pipe.send(Reply(ask, None, error))

    def load_adapter(self, name: str, path: str) -> None:
        self.engine.load_adapter(name, path)

    def unload_adapter(self, name: str) -> None:
        self.engine.unload_adapter(name)

    def stats(self) -> EngineStats:
        return EngineStats.of(self.engine)
