"""A rollout worker: an engine in a process of its own (a Ray actor), which samples while the trainer learns.

The engine runs on a thread; the actor's methods only post messages to it and take what it has finished. A task waits
until the worker has weights at least as new as it was submitted for. New weights are taken at once, and completions in
flight go on under them, with their keys and values computed again or kept; or, with `finish`, they are taken when all
that was submitted before has finished.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moesaic.align.rewards import weighted_rewards
from moesaic.align.rollouts.buffer import Task
from moesaic.align.rollouts.engine_work import EngineWork
from moesaic.align.rollouts.multi_turn import multi_turn_rollouts, open_environment
from moesaic.align.rollouts.pool import Rollout, RolloutPool, StartGroup
from moesaic.align.rollouts.rollout import Sample
from moesaic.align.rollouts.run_ahead import RunAhead
from moesaic.align.rollouts.weight_sync import receive
from moesaic.kernels import Mode
from moesaic.methods import Method, build
from moesaic.model.config import ModelConfig
from moesaic.model.tokenizer import Tokenizer
from moesaic.model.transformer import Model
from moesaic.serve.core.drafters import Drafter
from moesaic.serve.core.engine import Engine
from moesaic.worlds.completions import requests_for
from moesaic.worlds.example import Example

HEARTBEAT = 1.0  # seconds after which a worker sends a sign of life, if it has nothing else to send


@dataclass(frozen=True)
class Setup:
    """All a worker must know to be like the trainer, but for the weights."""

    config: ModelConfig
    files: dict[str, bytes]  # of the tokenizer
    dtype: torch.dtype
    device: str
    mode: Mode
    threads: int
    drafter: str | None
    max_requests: int
    group: int
    sampling: dict[str, Any]
    rewards: tuple[dict[str, Any], ...]
    environment: Method | None
    on_update: str
    seed: int

    def model(self) -> Model:
        torch.set_num_threads(self.threads)
        with torch.device(self.device):
            model = Model(self.config, self.mode).to(self.dtype)
        model.tokenizer = Tokenizer.from_files(self.files, Path("the trainer's model"))
        return model

    def weight_bytes(self) -> int:
        """Of all weights, of which a trainer may have a share."""
        with torch.device("meta"):
            tensors = Model(self.config, self.mode).to(self.dtype).state_dict().values()
        return sum(tensor.nbytes for tensor in tensors)

    def start_group(self) -> StartGroup:
        """What makes the rollouts of a group."""
        if self.environment is not None:
            return multi_turn_rollouts(open_environment(self.environment), self.group, self.sampling)

        def single_turn(engine: Engine, example: Example, seed: int) -> list[Rollout]:
            requests = requests_for(engine, example, self.group, self.sampling, seed)
            return [Rollout(example, request) for request in requests]

        return single_turn


@dataclass(frozen=True)
class Finished:
    """What came of a task: samples, or why there are none."""

    number: int
    samples: list[Sample] | None
    problem: str = ""


@dataclass(frozen=True)
class Events:
    """What happened in a worker since the last time."""

    finished: list[Finished]
    work: EngineWork
    ahead: int  # tokens generated ahead, for the drafter only
    idle: float  # seconds it had nothing to do
    process: int


class Worker:
    """Runs in the other process."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        drafter = build(Method(setup.drafter), Drafter, "align.stages: drafter") if setup.drafter else None
        self.engine = Engine(setup.model(), drafter=drafter, max_requests=setup.max_requests, seed=setup.seed)
        self.start_group = setup.start_group()
        self.pool = RolloutPool(self.engine, weighted_rewards(setup.rewards), judged_again=True)
        self.ahead = RunAhead(self.engine, self.start_group)
        self.waiting: dict[int, tuple[Task, Example]] = {}
        self.new_weights: dict[
            int, tuple[list[np.ndarray], frozenset[int]]
        ] = {}  # version -> weights, after which tasks
        self.done: set[int] = set()
        self.inbox: deque[Callable[[], None]] = deque()
        self.outbox: list[Finished] = []
        self.idle = 0.0
        self._sent = (EngineWork(), 0, 0.0)
        self._ready = asyncio.Event()
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None  # once the thread runs
        self._problem = ""  # why it has ended

    # Called by the trainer, on the actor's event loop

    async def update_weights(self, version: int, blocks: list[Any], after: list[int]) -> None:
        """Weights of a version. `blocks` are references in a list, so that Ray does not hold the call back for them."""
        weights = [await block for block in blocks]
        self._post(lambda: self.new_weights.__setitem__(version, (weights, frozenset(after))))

    async def submit(self, tasks: list[tuple[Task, Example]]) -> None:
        self._post(lambda: self.waiting.update({task.number: (task, example) for task, example in tasks}))

    async def announce(self, coming: list[tuple[Example, int]]) -> None:
        """Prompts that will probably be submitted next, with their seeds."""
        self._post(lambda: self.ahead.announce(coming))

    async def abort(self, number: int) -> None:
        self._post(lambda: self._abort(number))

    async def events(self) -> Events:
        """Whatever has finished, as soon as there is something; at the latest after a heartbeat. The first call starts
        the work."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._thread.start()
        if not self.outbox:
            self._ready.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ready.wait(), HEARTBEAT)
        if not self._thread.is_alive():
            raise RuntimeError(f"the engine's thread has ended: {self._problem}")
        finished, self.outbox = self.outbox, []
        work, ahead, idle = now = EngineWork.of(self.engine) - self.ahead.work, self.ahead.work.generated, self.idle
        work_before, ahead_before, idle_before = self._sent
        self._sent = now
        return Events(finished, work - work_before, ahead - ahead_before, idle - idle_before, os.getpid())

    def _post(self, message: Callable[[], None]) -> None:
        self.inbox.append(message)
        self.pool.changed.set()

    # On the engine's thread

    def _work(self) -> None:
        try:
            self._work_on()
        except BaseException as error:
            self._problem = f"{type(error).__name__}: {error}"
            raise

    def _work_on(self) -> None:
        while True:
            while self.inbox:
                self.inbox.popleft()()
            self._take_weights()
            self._start()
            finished = self.pool.step()
            for number, result in finished:
                problem = "" if isinstance(result, list) else f"{type(result).__name__}: {result}"
                self._send(Finished(number, result if isinstance(result, list) else None, problem))
            if not (finished or self.inbox or self.engine.working or self._startable()):
                began = time.monotonic()
                self.ahead.run(until=lambda: bool(self.inbox) or self.pool.changed.is_set())
                self.pool.changed.wait()
                if not self.pool.groups:  # else it waited for environments or rewards
                    self.idle += time.monotonic() - began

    def _take_weights(self) -> None:
        """Take the newest weights that may be taken now."""
        self.new_weights = {v: entry for v, entry in self.new_weights.items() if v > self.engine.version}
        while self.new_weights:
            version = min(self.new_weights) if self.setup.on_update == "finish" else max(self.new_weights)
            weights, after = self.new_weights[version]
            if self.setup.on_update == "finish" and not after <= self.done:
                return
            receive(self.engine, weights, version, recompute=self.setup.on_update == "recompute")
            self.new_weights = {other: entry for other, entry in self.new_weights.items() if other > version}

    def _startable(self) -> bool:
        return any(task.version <= self.engine.version for task, _ in self.waiting.values())

    def _start(self) -> None:
        for number, (task, example) in list(self.waiting.items()):
            if task.version > self.engine.version:
                continue
            del self.waiting[number]
            try:
                self.pool.add(number, self.start_group(self.engine, example, task.seed))
            except Exception as error:  # a prompt that cannot be completed costs only itself
                self._send(Finished(number, None, f"{type(error).__name__}: {error}"))

    def _abort(self, number: int) -> None:
        self.waiting.pop(number, None)
        self.pool.give_up(number)
        self.done.add(number)

    def _send(self, finished: Finished) -> None:
        self.done.add(finished.number)

        def send() -> None:
            self.outbox.append(finished)
            self._ready.set()

        assert self._loop is not None
        self._loop.call_soon_threadsafe(send)
