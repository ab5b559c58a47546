"""Rollout workers as the trainer sees them: started, given weights and prompts, polled, and restarted when they die or
fall silent. Ray is imported only here, when it is used."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from moesaic.align.rollouts.buffer import Task
from moesaic.align.rollouts.engine_work import EngineWork
from moesaic.align.rollouts.worker import Events, Finished, Setup, Worker
from moesaic.errors import UserError
from moesaic.worlds.example import Example

logger = logging.getLogger("moesaic.align")

MAX_DEATHS = 5  # of workers in a row, with nothing finished between them: it is not bad luck
START_SECONDS = 300.0  # seconds a new worker may take before it is silent for too long
STORE_BYTES = 128 << 20  # bytes of Ray's object store beside those for weights


@dataclass
class PoolCounts:
    """What the workers did since the counts were last reset."""

    work: EngineWork = field(default_factory=EngineWork)
    ahead: int = 0
    idle: float = 0.0
    deaths: int = 0
    requeued: int = 0


@dataclass(eq=False)
class WorkerHandle:
    """One worker."""

    number: int
    actor: Any = None
    events: Any = None  # the reference of its next events
    last_events: float = 0.0  # when they last came
    started: bool = False
    process: int = 0
    tasks: dict[int, tuple[Task, Example, float]] = field(default_factory=dict)  # in flight, and since when


class WorkerPool:
    """`patience`: seconds a task may take, and a worker may be silent; `retries`: how often a task is submitted
    again before it is given up."""

    def __init__(self, setup: Setup, workers: int, patience: float, retries: int, address: str | None = None) -> None:
        self.setup, self.patience, self.retries, self.address = setup, patience, retries, address
        self.handles = [WorkerHandle(number) for number in range(workers)]
        self.counts = PoolCounts()
        self._blocks: dict[int, list[Any]] = {}  # version -> where its weights are
        self._deaths = 0
        self._ray: Any = None
        self._own = False

    @property
    def started(self) -> bool:
        return self._ray is not None

    def start(self) -> None:
        try:
            import ray
        except ModuleNotFoundError:
            raise UserError("asynchronous", "needs Ray", "Install moesaic[cluster].") from None
        self._ray, self._own = ray, not ray.is_initialized()
        if self._own:
            options: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False, "logging_level": "error"}
            if self.address is None:
                options |= {"num_cpus": 1, "object_store_memory": STORE_BYTES + 4 * self.setup.weight_bytes()}
                options |= {"address": "local"}
            else:
                options |= {"address": self.address}
            ray.init(**options)
        for handle in self.handles:
            self._start(handle)

    def close(self) -> None:
        if not self.started:
            return
        for handle in self.handles:
            self._ray.kill(handle.actor)
            handle.tasks.clear()
        self._blocks.clear()
        if self._own:
            self._ray.shutdown()
        self._ray = None

    def publish(self, version: int, blocks: Iterable[np.ndarray]) -> None:
        """New weights for all workers. Older ones are kept while a task in flight was submitted for them."""
        self._blocks[version] = [self._ray.put(block) for block in blocks]
        oldest = min((t.version for handle in self.handles for t, _, _ in handle.tasks.values()), default=version)
        self._blocks = {v: blocks for v, blocks in self._blocks.items() if v >= oldest}
        for handle in self.handles:
            self._send_weights(handle, version)

    def submit(self, tasks: Sequence[tuple[Task, Example]]) -> None:
        """Each to the worker that has least to do."""
        shares: dict[int, list[tuple[Task, Example]]] = {}
        for task, example in tasks:
            handle = min(self.handles, key=lambda handle: len(handle.tasks))
            handle.tasks[task.number] = (task, example, time.monotonic())
            shares.setdefault(handle.number, []).append((task, example))
        for number, share in shares.items():
            self.handles[number].actor.submit.remote(share)

    def announce(self, coming: Sequence[tuple[Example, int]]) -> None:
        """Prompts that will probably be submitted next, with their seeds; to each worker those it will get, if all have
        equally much to do."""
        for handle in self.handles:
            handle.actor.announce.remote(list(coming[handle.number :: len(self.handles)]))

    def abort_all(self) -> None:
        """Nobody waits any more for what is in flight."""
        for handle in self.handles:
            for number in handle.tasks:
                handle.actor.abort.remote(number)
            handle.tasks.clear()

    def poll(self, seconds: float) -> list[Finished]:
        """What has finished meanwhile; waits up to `seconds` for the first of it."""
        ray = self._ray
        ready, _ = ray.wait([handle.events for handle in self.handles], num_returns=1, timeout=seconds)
        if len(self.handles) > 1 and ready:
            ready, _ = ray.wait([handle.events for handle in self.handles], num_returns=len(self.handles), timeout=0)
        finished: list[Finished] = []
        for handle in self.handles:
            if handle.events in ready:
                try:
                    finished += self._take(handle, ray.get(handle.events))
                except ray.exceptions.RayError as error:
                    finished += self._died(handle, str(error).strip().splitlines()[-1])
        return finished + self._late()

    def _take(self, handle: WorkerHandle, events: Events) -> list[Finished]:
        now = time.monotonic()
        if not handle.started:  # the time of its tasks begins now
            handle.tasks = {number: (task, example, now) for number, (task, example, _) in handle.tasks.items()}
        handle.last_events, handle.started, handle.process = now, True, events.process
        handle.events = handle.actor.events.remote()
        self.counts.work += events.work
        self.counts.ahead += events.ahead
        self.counts.idle += events.idle
        # What was submitted again elsewhere may come twice; the first counts.
        finished = [one for one in events.finished if handle.tasks.pop(one.number, None) is not None]
        if finished:
            self._deaths = 0
        return finished

    def _start(self, handle: WorkerHandle) -> None:
        kind = self._ray.remote(Worker)
        resources = {"num_gpus": 1} if self.setup.device.startswith("cuda") else {"num_cpus": 0}
        handle.actor = kind.options(max_concurrency=1000, **resources).remote(self.setup)
        handle.events = handle.actor.events.remote()
        handle.last_events, handle.started = time.monotonic(), False

    def _send_weights(self, handle: WorkerHandle, version: int) -> None:
        after = [number for number, (task, _, _) in handle.tasks.items() if task.version < version]
        handle.actor.update_weights.remote(version, self._blocks[version], after)

    def _died(self, handle: WorkerHandle, why: str) -> list[Finished]:
        """Restart it, with the weights its tasks were submitted for and those after; submit them again."""
        logger.error("rollout worker %d died and is restarted: %s", handle.number, why)
        self.counts.deaths += 1
        self._deaths += 1
        if self._deaths >= MAX_DEATHS:
            raise RuntimeError(f"{MAX_DEATHS} rollout workers died one after the other; the last: {why}")
        tasks, handle.tasks = handle.tasks, {}
        self._ray.kill(handle.actor)
        self._start(handle)
        finished = []
        for task, example, _ in tasks.values():
            task.tries += 1
            if task.tries > self.retries + MAX_DEATHS:
                finished.append(Finished(task.number, None, "the workers it was submitted to died"))
                continue
            self.counts.requeued += 1
            handle.tasks[task.number] = (task, example, time.monotonic())
        oldest = min([task.version for task, _, _ in handle.tasks.values()] + [max(self._blocks, default=0)])
        for version in sorted(version for version in self._blocks if version >= oldest):
            self._send_weights(handle, version)
        if handle.tasks:
            handle.actor.submit.remote([(task, example) for task, example, _ in handle.tasks.values()])
        return finished

    def _late(self) -> list[Finished]:
        """Tasks that take too long are submitted again, at last given up; so is a worker that is silent too long."""
        finished = []
        now = time.monotonic()
        for handle in self.handles:
            if now - handle.last_events > (self.patience if handle.started else max(self.patience, START_SECONDS)):
                finished += self._died(handle, f"silent for {now - handle.last_events:.0f} s")
                continue
            late = [entry for entry in handle.tasks.values() if handle.started and now - entry[2] > self.patience]
            for task, example, _ in late:
                del handle.tasks[task.number]
                handle.actor.abort.remote(task.number)
                task.tries += 1
                if task.tries > self.retries:
                    finished.append(Finished(task.number, None, f"not finished after {self.patience:g} s"))
                else:
                    self.counts.requeued += 1
                    self.submit([(task, example)])
        return finished
