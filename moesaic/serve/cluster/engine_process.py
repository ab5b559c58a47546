"""A worker on this machine: an engine in a process of its own, or a group of ranks, one process each.

    worker = EngineProcess.start(EngineOptions(directory, load_options, engine_options))
    ready = worker.wait()           what the front has to know of it
    worker.listen(take)             Outputs of a whole step, Lost, Reply go to `take`
    worker.send(Add([(number, serialize_request(engine, request))]))

Rank 0 has the engine. Every rank has a pipe to the front: by it pings are answered, and when it is closed at the other
end the rank ends, so nothing outlives the front.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import select
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Protocol

from moesaic.errors import UserError
from moesaic.serve.cluster.engine_server import EngineServer
from moesaic.serve.cluster.kinds import engine_kind
from moesaic.serve.cluster.messages import End, EngineOptions, Failed, FromEngine, Ping, Pong, Ready, ToEngine
from moesaic.serve.cluster.worker import Listener

SWITCH_SECONDS = 0.001  # until a thread that waits for Python gets it: messages wait for it, and streams
END_SECONDS = 10.0  # for a process to end before it is killed
SMALL = 32 << 10  # bytes that fit the buffer of a pipe that can be written to


class RankProcess(Protocol):
    """What is used of a process, here or on another machine."""

    @property
    def pid(self) -> int | None: ...

    def kill(self) -> None: ...

    def join(self, timeout: float | None = None) -> None: ...

    def is_alive(self) -> bool: ...


class EngineProcess:
    """Seen from the front; `processes` and `pipes` by rank."""

    def __init__(self, options: EngineOptions, address: str | None = None) -> None:
        kind = engine_kind(options)
        self.options, self.ranks = options, kind.vital
        self.address = address or (f"127.0.0.1:{free_port()}" if kind.ranks > 1 else "")
        self.spare = {rank: SpareRank() for rank in range(kind.vital, kind.ranks)}
        self._lock, self._ended = threading.Lock(), False
        self.processes: list[RankProcess] = []
        self.pipes: list[Connection] = []
        for rank in range(kind.ranks):
            process, pipe = self._start_rank(rank)
            self.processes.append(process)
            self.pipes.append(pipe)
        self._outboxes = [Outbox(pipe) for pipe in self.pipes]

    @classmethod
    def start(cls, options: EngineOptions) -> EngineProcess:
        return cls(options)

    def _start_rank(self, rank: int) -> tuple[RankProcess, Connection]:
        # A process is forked from one that has imported everything and computed nothing (CUDA does not survive a fork):
        # importing takes longer than loading a small model, and a worker that died is waited for.
        multiprocessing.set_forkserver_preload(["moesaic.serve.cluster.preload"])
        context = multiprocessing.get_context("forkserver")
        ours, theirs = context.Pipe()
        name = f"moesaic engine rank {rank}" if self.address else "moesaic engine"
        arguments = (self.options, rank, self.address, theirs)
        process = context.Process(target=run_rank, args=arguments, name=name, daemon=True)
        process.start()
        theirs.close()  # so that the end of the process ends what is read from it
        return process, ours

    def wait(self) -> Ready:
        try:
            while True:
                for found in [pipe.recv() for pipe in wait(self.pipes) if isinstance(pipe, Connection)]:
                    if isinstance(found, Failed):
                        raise found.problem
                    if isinstance(found, Ready):
                        return self._with_pids(found)
        except EOFError:
            problem = f"ended as it started ({self.why()})"
            raise UserError("the engine's process", problem, "Is there memory enough for the model?") from None
        finally:
            if sys.exception() is not None:
                self.kill()

    def listen(self, take: Listener) -> None:
        for rank, pipe in enumerate(self.pipes):
            read, arguments = (self._read_spare, (rank,)) if rank in self.spare else (self._read, (pipe, take))
            threading.Thread(target=read, args=arguments, name="engine outputs", daemon=True).start()

    def _read(self, pipe: Connection, take: Listener) -> None:
        while True:
            try:
                message = pipe.recv()
            except (EOFError, OSError):
                take(None)
                return
            take(self._with_pids(message) if isinstance(message, Ready) else message)

    def _read_spare(self, rank: int) -> None:
        """A rank that the engine can do without: it is started again when it has died."""
        spare = self.spare[rank]
        while not self._ended:
            try:
                while True:
                    if isinstance(self.pipes[rank].recv(), Pong):
                        spare.answered()
            except (EOFError, OSError):
                time.sleep(spare.died())
            with self._lock:
                if not self._ended:
                    self.processes[rank].join()
                    self.processes[rank], self.pipes[rank] = self._start_rank(rank)
                    self._outboxes[rank] = Outbox(self.pipes[rank])

    def _with_pids(self, ready: Ready) -> Ready:
        for spare in self.spare.values():
            spare.answered()  # all ranks are there, or the engine would not be
        return ready._replace(pids=tuple(process.pid or 0 for process in self.processes))

    def send(self, message: ToEngine) -> None:
        data = pickle.dumps(message)
        if isinstance(message, Ping):
            for rank, spare in self.spare.items():
                if spare.silent():  # it was stopped
                    self.processes[rank].kill()
        for outbox in self._outboxes if isinstance(message, Ping) else self._outboxes[:1]:
            outbox.send(data)

    def kill(self) -> None:
        with self._lock:
            self._ended = True
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()

    def end(self) -> None:
        with self._lock:
            self._ended = True
        self.send(End())
        for process in self.processes:
            process.join(END_SECONDS)
        self.kill()

    @property
    def alive(self) -> bool:
        return any(process.is_alive() for process in self.processes)

    def why(self) -> str:
        here = {rank: process for rank, process in enumerate(self.processes) if isinstance(process, BaseProcess)}
        gone = wait([process.sentinel for process in here.values()], timeout=1.0) if here else []
        for process in here.values():
            if process.sentinel in gone:
                process.join(1.0)
        codes = {rank: process.exitcode for rank, process in here.items() if process.exitcode is not None}
        return ", ".join(f"exit code {code}" + f" of rank {rank}" * (self.ranks > 1) for rank, code in codes.items())


class SpareRank:
    """Whether a rank that may die is there: pings come four times in `stall_seconds`."""

    PINGS = 8  # without an answer, after which it counts as stopped

    def __init__(self) -> None:
        self.heard, self.unanswered, self.deaths = False, 0, 0

    def answered(self) -> None:
        self.heard, self.unanswered, self.deaths = True, 0, 0

    def silent(self) -> bool:
        self.unanswered += self.heard
        return self.unanswered > self.PINGS

    def died(self) -> float:
        """For how long to wait before it is started again: longer while it keeps dying."""
        self.heard, self.unanswered, self.deaths = False, 0, self.deaths + 1
        return float(min(60.0, 0.5 * 2**self.deaths))


class Outbox:
    """Sends without ever waiting: what a pipe does not take at once, because nobody reads at its other end, a thread
    sends when it does."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe
        self._late: deque[bytes] = deque()
        self._lock = threading.Lock()
        self._poll = select.poll()
        self._poll.register(pipe.fileno(), select.POLLOUT)

    def send(self, data: bytes) -> None:
        with self._lock:
            if not self._late and len(data) <= SMALL and self._poll.poll(0):
                with contextlib.suppress(OSError):
                    self.pipe.send_bytes(data)
                return
            self._late.append(data)
            if len(self._late) == 1:
                threading.Thread(target=self._catch_up, name="engine messages", daemon=True).start()

    def _catch_up(self) -> None:
        while True:
            with contextlib.suppress(OSError):
                self.pipe.send_bytes(self._late[0])
            with self._lock:
                self._late.popleft()
                if not self._late:
                    return


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


# In the processes


def run_rank(options: EngineOptions, rank: int, address: str, pipe: Connection) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # they mean the server, which lets requests finish
        signal.signal(number, signal.SIG_IGN)
    sys.setswitchinterval(SWITCH_SECONDS)
    show_name(f"moe:{options.role or 'engine'}.{rank}")
    lock = threading.Lock()

    def send(message: FromEngine) -> None:
        with lock:
            pipe.send(message)

    if rank:
        _listen(pipe, lambda message: send(Pong(rank)) if isinstance(message, Ping) else None)
        try:
            engine_kind(options).follow(options, rank, address)
        except Exception as error:
            with contextlib.suppress(OSError):
                send(
                    Failed(error if isinstance(error, UserError) else RuntimeError(f"{type(error).__name__}: {error}"))
                )
    else:
        server = EngineServer(options, address, send)
        _listen(pipe, server.take)
        server.run()
    sys.stderr.flush()
    os._exit(0)  # threads of a group that lost a rank may wait for it


def show_name(name: str) -> None:
    """In `ps` and `top`, where the system lets a process call itself something."""
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(name[:15])


def _listen(pipe: Connection, take: Callable[[Any], None]) -> None:
    def read() -> None:
        try:
            while True:
                take(pipe.recv())
        except (EOFError, OSError):  # the front has gone: nobody waits for anything here
            os._exit(1)

    threading.Thread(target=read, name="messages", daemon=True).start()
