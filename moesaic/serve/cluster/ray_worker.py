"""A worker on Ray: every rank is an actor, on whatever machine of the cluster has room for it.

    start = OnRay(address)          starts or joins Ray
    worker = start(options)         what `EngineProcess.start` is on this machine

The same messages go through the actors' methods. Ray places actors and says when one has died; that one is silent is
found by pings, as everywhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import threading
from typing import Any

from moesaic.errors import UserError
from moesaic.kernels import hardware
from moesaic.serve.cluster.engine_process import END_SECONDS, free_port
from moesaic.serve.cluster.engine_server import EngineServer
from moesaic.serve.cluster.kinds import engine_kind
from moesaic.serve.cluster.messages import End, EngineOptions, Failed, FromEngine, Ping, Pong, Ready, ToEngine
from moesaic.serve.cluster.worker import Listener


class OnRay:
    """Starts workers. `address` is that of a cluster, "auto" the one this machine belongs to; without, one is begun."""

    def __init__(self, address: str | None = None, *, gpu: bool = False) -> None:
        try:
            import ray
        except ModuleNotFoundError:
            raise UserError("--ray", "needs Ray", "Install moesaic[cluster].") from None
        self.ray: Any = ray
        if not ray.is_initialized():
            dashboard = None if address is not None else False
            try:
                ray.init(address, include_dashboard=dashboard, log_to_driver=False, logging_level=logging.ERROR)
            except ConnectionError:
                raise UserError(f"--ray {address}", "there is no Ray cluster", "Run `ray start --head`.") from None
        # No CPUs are reserved: where there are fewer than workers, they share them.
        self.resources: dict[str, Any] = {"num_gpus": 1} if gpu else {"num_cpus": 0, "scheduling_strategy": "SPREAD"}

    def __call__(self, options: EngineOptions) -> RayWorker:
        return RayWorker(self.ray, options, self.resources)

    def room(self, options: EngineOptions, like: Ready) -> bool:
        free, ranks = self.ray.available_resources(), engine_kind(options).ranks
        gpus = free.get("GPU", 0.0) >= ranks * self.resources.get("num_gpus", 0)
        return bool(gpus and free.get("memory", 0.0) >= ranks * like.bytes)


class RayWorker:
    def __init__(self, ray: Any, options: EngineOptions, resources: dict[str, Any]) -> None:
        self.ray = ray
        self.ranks = engine_kind(options).ranks
        kind = ray.remote(RankActor).options(max_concurrency=1000, max_restarts=0, **resources)
        self.actors = [kind.remote(options, rank) for rank in range(self.ranks)]
        self._numbers = [itertools.count() for _ in self.actors]
        self._where: list[tuple[str, int]] = []  # node and process of each rank, once they are known
        self._streams: list[Any] = []
        self._problem = ""

    def wait(self) -> Ready:
        try:
            self._begin()
            for reference in self._streams[0]:
                message = self.ray.get(reference)
                if isinstance(message, Failed):
                    raise message.problem
                if isinstance(message, Ready):
                    return self._with_pids(message)
            raise UserError("an actor of Ray", "ended as it started")
        except self.ray.exceptions.RayError as error:
            problem = f"ended as it started ({first_line(error)})"
            raise UserError("an actor of Ray", problem, "Is there memory enough for the model?") from None

    def _begin(self) -> None:
        address = self.ray.get(self.actors[0].address.remote())
        self._where = self.ray.get([actor.where.remote() for actor in self.actors])
        streaming = [actor.run.options(num_returns="streaming") for actor in self.actors]
        self._streams = [run.remote(address) for run in streaming]

    def _with_pids(self, ready: Ready) -> Ready:
        return ready._replace(pids=tuple(pid for _, pid in self._where))

    def listen(self, take: Listener) -> None:
        threading.Thread(target=self._listen, args=(take,), name="actor outputs", daemon=True).start()

    def _listen(self, take: Listener) -> None:
        try:
            if not self._streams:
                self._begin()
        except Exception as error:
            self._problem = first_line(error)
            take(None)
            return
        for rank in range(1, self.ranks):
            threading.Thread(target=self._read, args=(rank, take), name="actor outputs", daemon=True).start()
        self._read(0, take)

    def _read(self, rank: int, take: Listener) -> None:
        try:
            for reference in self._streams[rank]:
                message = self.ray.get(reference)
                take(self._with_pids(message) if isinstance(message, Ready) else message)
        except Exception as error:
            self._problem = self._problem or first_line(error)
        take(None)

    def send(self, message: ToEngine) -> None:
        for rank, actor in enumerate(self.actors) if isinstance(message, Ping) else [(0, self.actors[0])]:
            with contextlib.suppress(self.ray.exceptions.RayError):
                actor.take.remote(next(self._numbers[rank]), message)

    def kill(self) -> None:
        """Ray asks an actor to end, which one that was stopped never hears: a task beside it ends its process."""
        for actor in self.actors:
            self.ray.kill(actor)
        kill = self.ray.remote(num_cpus=0)(_kill)
        place = self.ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        tasks = [kill.options(scheduling_strategy=place(node, soft=False)).remote(pid) for node, pid in self._where]
        with contextlib.suppress(self.ray.exceptions.RayError):
            self.ray.get(tasks, timeout=END_SECONDS)

    def end(self) -> None:
        self.send(End())
        with contextlib.suppress(self.ray.exceptions.RayError):
            self.ray.get([actor.ended.remote() for actor in self.actors], timeout=END_SECONDS)
        self.kill()

    def why(self) -> str:
        return self._problem


def first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


# In the actors


class RankActor:
    """Methods run on the actor's event loop, the engine on a thread."""

    def __init__(self, options: EngineOptions, rank: int) -> None:
        if options.load_options.get("threads"):  # by the cores of the front's machine; this one may have fewer
            options.load_options["threads"] = min(options.load_options["threads"], hardware.cores())
        self.options, self.rank = options, rank
        self.outputs: asyncio.Queue[FromEngine | None] = asyncio.Queue()
        self.server: EngineServer | None = None
        self.early: dict[int, ToEngine] = {}  # messages that overtook others
        self.next = 0
        self.over = asyncio.Event()

    async def address(self) -> str:
        """Where the ranks of this one's group can meet."""
        import ray

        return f"{ray.util.get_node_ip_address()}:{free_port()}"

    async def where(self) -> tuple[str, int]:
        import ray

        return ray.get_runtime_context().get_node_id(), os.getpid()

    async def run(self, address: str) -> Any:
        """What this rank has to say, until it ends."""
        events = asyncio.get_running_loop()

        def send(message: FromEngine | None) -> None:
            events.call_soon_threadsafe(self.outputs.put_nowait, message)

        def work() -> None:
            try:
                if self.server is not None:
                    self.server.run()
                else:
                    engine_kind(self.options).follow(self.options, self.rank, address)
            except Exception as error:
                send(Failed.by(error))
            finally:
                send(None)
                events.call_soon_threadsafe(self.over.set)

        if self.rank == 0:
            self.server = EngineServer(self.options, address, send)
        threading.Thread(target=work, name="engine", daemon=True).start()
        while (message := await self.outputs.get()) is not None:
            yield message

    async def take(self, number: int, message: ToEngine) -> None:
        """In the order they were sent, which large ones do not always arrive in."""
        self.early[number] = message
        while self.next in self.early:
            message = self.early.pop(self.next)
            self.next += 1
            if self.server is not None:
                self.server.take(message)
            elif isinstance(message, Ping):
                self.outputs.put_nowait(Pong(self.rank))

    async def ended(self) -> None:
        await self.over.wait()
