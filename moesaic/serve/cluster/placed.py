"""Workers on machines where another program has started a process for every rank: torchrun, or Slurm's srun.

    torchrun --nnodes 2 --nproc-per-node 8 ... -m moesaic serve DIR --layout "tp=8 ep=16" --placed-by torchrun

All processes run the same command. The first is the front; in the others an agent waits for it. A rank of a worker is a
child of one of them: the agent starts and kills it as the front says, and the child connects to the front by itself.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import multiprocessing
import os
import secrets
import signal
import socket
import threading
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Client, Connection, Listener
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from moesaic.errors import UserError
from moesaic.serve.cluster.engine_process import END_SECONDS, EngineProcess, RankProcess, free_port, run_rank
from moesaic.serve.cluster.kinds import engine_kind
from moesaic.serve.cluster.messages import EngineOptions, Ready

MEETING_SECONDS = 600.0  # for all processes of a job to come
LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "slurm": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
}


@dataclass(frozen=True)
class Placement:
    """Where this process stands among those that were started together."""

    rank: int
    count: int
    local: int
    neighbours: int  # processes on this machine
    address: str  # of the first one's machine
    port: int

    @classmethod
    def read(cls, launcher: str) -> Placement:
        if launcher not in LAUNCHERS:
            raise UserError("--placed-by", f'there is no "{launcher}"', f"Take {' or '.join(LAUNCHERS)}.")
        names = [*LAUNCHERS[launcher], "MASTER_ADDR", "MASTER_PORT"]
        if launcher == "slurm" and "SLURM_NTASKS_PER_NODE" not in os.environ:
            names[3] = "SLURM_NTASKS"
        missing = [name for name in names if name not in os.environ]
        if missing:
            problem = f"the environment has no {', '.join(missing)}"
            raise UserError(f"--placed-by {launcher}", problem, "docs/deploy.md says how to start it.")
        rank, count, local, neighbours, port = (int(os.environ[name]) for name in (*names[:4], "MASTER_PORT"))
        return cls(rank, count, local, neighbours, os.environ["MASTER_ADDR"], port)

    def store(self) -> dist.TCPStore:
        """torchrun's own where it has one, else one of the first process."""
        own = self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        limit = timedelta(seconds=MEETING_SECONDS)
        return dist.TCPStore(self.address, self.port, None, own, limit, wait_for_workers=False)


class Hello(NamedTuple):
    """The first word on every connection to the front. `life` is None where it is the agent's own."""

    place: int
    life: int | None
    pid: int
    host: str
    device: str  # for a rank there; none: a CPU


class Start(NamedTuple):
    life: int
    options: EngineOptions
    rank: int
    address: str


class Kill(NamedTuple):
    pass


class FindPort(NamedTuple):
    """Where ranks could meet; the agent answers with its number."""


class Join(NamedTuple):
    """The agent answers whether the process has ended within so many seconds."""

    seconds: float


# At the front


class OnPlaces:
    """Starts workers on places, one for each rank. The front's own process is a place too."""

    def __init__(self, placement: Placement) -> None:
        self.placement = placement
        self._key = secrets.token_bytes(32)
        self._listener = Listener(("", 0), backlog=placement.count, authkey=self._key)
        self._changed = threading.Condition()
        self._said: dict[tuple[int, int | None], tuple[Hello, Connection]] = {}
        self._used: set[int] = set()
        self._lives = itertools.count()
        self._store = placement.store()
        port = self._listener.address[1]
        self._front = (placement.address, int(port), self._key)
        self._store.set("moesaic/front", json.dumps([placement.address, port, self._key.hex()]))
        threading.Thread(target=self._accept, name="places", daemon=True).start()
        threading.Thread(target=run_agent, args=(placement, self._front), name="agent", daemon=True).start()
        self.agents = [Agent(*self.connection(place, None, MEETING_SECONDS)) for place in range(placement.count)]

    def _accept(self) -> None:
        while True:
            with contextlib.suppress(Exception):  # whoever does not know the key, or leaves at once
                connection = self._listener.accept()
                hello = connection.recv()
                with self._changed:
                    self._said[hello.place, hello.life] = hello, connection
                    self._changed.notify_all()

    def connection(self, place: int, life: int | None, seconds: float) -> tuple[Hello, Connection]:
        with self._changed:
            if not self._changed.wait_for(lambda: (place, life) in self._said, seconds):
                problem = f"nothing was heard of it for {seconds:.0f} s"
                raise UserError(f"process {place} of {self.placement.count}", problem, "Was it started?")
            return self._said.pop((place, life))

    def free(self) -> list[int]:
        return [place for place in range(self.placement.count) if place not in self._used]

    def leave(self, places: list[int]) -> None:
        with self._changed:
            self._used -= set(places)

    def room(self, options: EngineOptions, like: Ready) -> bool:
        return len(self.free()) >= engine_kind(options).ranks

    def __call__(self, options: EngineOptions) -> PlacedWorker:
        ranks = engine_kind(options).ranks
        with self._changed:
            places = self.free()[:ranks]
            if len(places) < ranks:
                count = self.placement.count
                raise UserError("--layout", f"a worker needs {ranks} processes, {len(places)} of {count} are free")
            self._used |= set(places)
        try:
            devices = tuple(self.agents[place].hello.device for place in places)
            return PlacedWorker(self, places, replace(options, devices=devices) if all(devices) else options)
        except BaseException as error:
            for place in places:
                with contextlib.suppress(OSError):
                    self.agents[place].control.send(Kill())
            self.leave(places)
            if isinstance(error, OSError | EOFError):
                raise UserError("--placed-by", "a process of the job has ended", "Start the job again.") from None
            raise

    def begin(self, place: int, options: EngineOptions, rank: int, address: str) -> int:
        """A rank there; the number of its life."""
        life = next(self._lives)
        self.agents[place].control.send(Start(life, options, rank, address))
        return life


class Agent:
    def __init__(self, hello: Hello, control: Connection) -> None:
        self.hello, self.control = hello, control
        self._lock = threading.Lock()

    def ask(self, question: FindPort | Join, seconds: float = END_SECONDS) -> Any:
        with self._lock:
            self.control.send(question)
            if not self.control.poll(seconds):
                raise EOFError
            return self.control.recv()


@dataclass(frozen=True)
class PlacedProcess:
    """A rank's process, by its agent."""

    agent: Agent
    pid: int

    def kill(self) -> None:
        with contextlib.suppress(OSError):
            self.agent.control.send(Kill())

    def join(self, timeout: float | None = None) -> None:
        seconds = END_SECONDS if timeout is None else timeout
        with contextlib.suppress(OSError, EOFError):
            self.agent.ask(Join(seconds), seconds + END_SECONDS)

    def is_alive(self) -> bool:
        try:
            return not self.agent.ask(Join(0.0))
        except (OSError, EOFError):
            return False


class PlacedWorker(EngineProcess):
    def __init__(self, places: OnPlaces, used: list[int], options: EngineOptions) -> None:
        self.places, self.used = places, used
        self.options = options
        first = places.agents[used[0]]
        address = f"{first.hello.host}:{first.ask(FindPort())}"
        # All are told before the first is waited for.
        self._begun = {rank: places.begin(place, options, rank, address) for rank, place in enumerate(used)}
        super().__init__(options, address)

    def _start_rank(self, rank: int) -> tuple[RankProcess, Connection]:
        place, life = self.used[rank], self._begun.pop(rank, None)
        if life is None:
            life = self.places.begin(place, self.options, rank, self.address)
        hello, connection = self.places.connection(place, life, MEETING_SECONDS)
        return PlacedProcess(self.places.agents[place], hello.pid), connection

    def kill(self) -> None:
        super().kill()
        self.places.leave(self.used)


# In the processes


def follow_front(placement: Placement) -> None:
    """In every process but the first: be an agent until the front ends."""
    for number in (signal.SIGINT, signal.SIGTERM):  # they mean the front, which lets requests finish
        signal.signal(number, signal.SIG_IGN)
    store = placement.store()
    store.wait(["moesaic/front"], timedelta(seconds=MEETING_SECONDS))
    host, port, key = json.loads(store.get("moesaic/front"))
    run_agent(placement, (host, port, bytes.fromhex(key)))


def own_address(front: str) -> str:
    """Of this machine, as the front's sees it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as found:
        found.connect((front, 1))  # nothing is sent
        return str(found.getsockname()[0])


def run_agent(placement: Placement, front: tuple[str, int, bytes]) -> None:
    host, port, key = front
    multiprocessing.set_forkserver_preload(["moesaic.serve.cluster.preload"])
    context = multiprocessing.get_context("forkserver")
    forkserver.ensure_running()
    control = Client((host, port), authkey=key)
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = f"cuda:{placement.local % gpus}" if gpus else ""
    hello = Hello(placement.rank, None, os.getpid(), own_address(host), device)
    control.send(hello)
    process: BaseProcess | None = None
    try:
        while True:
            message: Any = control.recv()
            if isinstance(message, Start):
                said = hello._replace(life=message.life)
                process = context.Process(target=_run_child, args=(said, message, front), daemon=True)
                process.start()
            elif isinstance(message, FindPort):
                control.send(free_port())
            elif isinstance(message, Join):
                if process is not None:
                    process.join(message.seconds)
                control.send(process is None or not process.is_alive())
            elif process is not None:
                process.kill()
    except (EOFError, OSError):  # the front has gone
        if process is not None:
            process.kill()


def _run_child(hello: Hello, start: Start, front: tuple[str, int, bytes]) -> None:
    host, port, key = front
    pipe = Client((host, port), authkey=key)
    pipe.send(hello._replace(pid=os.getpid()))
    run_rank(start.options, start.rank, start.address, pipe)
