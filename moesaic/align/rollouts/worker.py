"""A rollout worker: an engine in a process of its own (a Ray actor), which answers questions while the trainer learns.

The engine runs on a thread; the actor's methods only leave notes for it and take what it has finished. A question
waits until the worker has weights at least as new as it was asked for. New weights are taken at once, and answers under
way go on under them, with their keys and values computed again or kept; or, with `finish`, they are taken when all that
was asked before has been answered.
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
from typing import Any

import numpy as np
import torch

from moesaic.align.rewards import weighted_rewards
from moesaic.align.rollouts.buffer import Task
from moesaic.align.rollouts.multi_turn import Begin, open_environment, players
from moesaic.align.rollouts.pool import Rollout, RolloutPool
from moesaic.align.rollouts.rollout import Sample
from moesaic.align.rollouts.run_ahead import RunAhead
from moesaic.align.rollouts.weight_sync import unpack_into
from moesaic.kernels import Mode
from moesaic.methods import Method, build
from moesaic.model.config import ModelConfig
from moesaic.model.tokenizer import Tokenizer
from moesaic.model.transformer import Model
from moesaic.serve.core.drafters import Drafter
from moesaic.serve.core.engine import Engine
from moesaic.worlds.completions import requests_for
from moesaic.worlds.example import Example

BEAT = 1.0  # seconds after which a worker says that it lives, if it has nothing else to say


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
    wishes: dict[str, Any]
    rewards: tuple[dict[str, Any], ...]
    environment: Method | None
    on_update: str
    seed: int

    def model(self) -> Model:
        from pathlib import Path

        torch.set_num_threads(self.threads)
        with torch.device(self.device):
            model = Model(self.config, self.mode).to(self.dtype)
        model.tokenizer = Tokenizer.from_files(self.files, Path("the trainer's model"))
        return model

    def begin(self) -> Begin:
        """What makes the answers of a group."""
        if self.environment is not None:
            return players(open_environment(self.environment), self.group, self.wishes)

        def answers(engine: Engine, example: Example, seed: int) -> list[Rollout]:
            return [
                Rollout(example, request) for request in requests_for(engine, example, self.group, self.wishes, seed)
            ]

        return answers


@dataclass(frozen=True)
class Finished:
    """What came of a ticket: samples, or why there are none."""

    number: int
    samples: list[Sample] | None
    problem: str = ""


@dataclass(frozen=True)
class News:
    """What a worker has to tell since it was last asked."""

    finished: list[Finished]
    steps: int
    generated: int
    accepted: int
    ahead: int  # tokens written ahead, for the drafter only
    idle: float  # seconds it had nothing to do
    process: int


class Worker:
    """Runs in the other process."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        drafter = build(Method(setup.drafter), Drafter, "align.stages: drafter") if setup.drafter else None
        self.engine = Engine(setup.model(), drafter=drafter, max_requests=setup.max_requests, seed=setup.seed)
        self.begin_group = setup.begin()
        self.pool = RolloutPool(self.engine, weighted_rewards(setup.rewards), judged_again=True)
        self.ahead = RunAhead(self.engine, setup.group, setup.wishes)
        self.waiting: dict[int, tuple[Task, Example]] = {}
        self.renewals: dict[int, tuple[np.ndarray, frozenset[int]]] = {}  # version -> weights, after which tickets
        self.answered: set[int] = set()
        self.inbox: deque[Callable[[], None]] = deque()
        self.outbox: list[Finished] = []
        self.idle = 0.0
        self._told = (0, 0, 0, 0, 0.0)
        self._ready = asyncio.Event()
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)

    # Called by the trainer, on the actor's event loop

    async def begin(self) -> None:
        self._events = asyncio.get_running_loop()
        self._thread.start()

    async def renew(self, version: int, block: list[Any], after: list[int]) -> None:
        """Weights of a version. `block` is a reference in a list, so that Ray does not hold the call back for it."""
        weights = await block[0]
        self._note(lambda: self.renewals.__setitem__(version, (weights, frozenset(after))))

    async def ask(self, asked: list[tuple[Task, Example]]) -> None:
        self._note(lambda: self.waiting.update({ticket.number: (ticket, example) for ticket, example in asked}))

    async def foretell(self, coming: list[tuple[Example, int]]) -> None:
        """Questions that will probably be asked next, with their seeds."""
        self._note(lambda: self.ahead.foretold(coming))

    async def give_up(self, number: int) -> None:
        self._note(lambda: self._give_up(number))

    async def collect(self) -> News:
        """Whatever has been finished, as soon as there is something; at the latest after a beat."""
        if not self.outbox:
            self._ready.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ready.wait(), BEAT)
        if not self._thread.is_alive():
            raise RuntimeError("the engine's thread has ended")
        finished, self.outbox = self.outbox, []
        counts, ahead = self.engine.counts, self.ahead.counts
        now = (
            counts.steps - ahead.steps,
            counts.generated_tokens - ahead.generated_tokens,
            counts.accepted_tokens - ahead.accepted_tokens,
            ahead.generated_tokens,
            self.idle,
        )
        steps, generated, accepted, written, idle = (a - b for a, b in zip(now, self._told))
        self._told = now
        return News(finished, int(steps), int(generated), int(accepted), int(written), idle, os.getpid())

    def _note(self, note: Callable[[], None]) -> None:
        self.inbox.append(note)
        self.pool.news.set()

    # On the engine's thread

    def _work(self) -> None:
        while True:
            while self.inbox:
                self.inbox.popleft()()
            self._renew()
            self._start()
            ended = self.pool.step()
            for number, result in ended:
                problem = "" if isinstance(result, list) else f"{type(result).__name__}: {result}"
                self._tell(Finished(number, result if isinstance(result, list) else None, problem))
            if not (ended or self.inbox or self.engine.working or self._startable()):
                began = time.monotonic()
                self.ahead.run(until=lambda: bool(self.inbox) or self.pool.news.is_set())
                self.pool.news.wait()
                if not self.pool.groups:  # else it waited for tools or judges
                    self.idle += time.monotonic() - began

    def _renew(self) -> None:
        """Take the newest weights that may be taken now."""
        self.renewals = {v: entry for v, entry in self.renewals.items() if v > self.engine.version}
        while self.renewals:
            version = min(self.renewals) if self.setup.on_update == "finish" else max(self.renewals)
            weights, after = self.renewals[version]
            if self.setup.on_update == "finish" and not after <= self.answered:
                return
            unpack_into(self.engine.model, weights)
            self.engine.version = version - 1
            self.engine.weights_changed(recompute=self.setup.on_update == "recompute")
            self.renewals = {other: entry for other, entry in self.renewals.items() if other > version}

    def _startable(self) -> bool:
        return any(ticket.version <= self.engine.version for ticket, _ in self.waiting.values())

    def _start(self) -> None:
        for number, (ticket, example) in list(self.waiting.items()):
            if ticket.version > self.engine.version:
                continue
            del self.waiting[number]
            try:
                self.pool.add(number, self.begin_group(self.engine, example, ticket.seed))
            except Exception as error:  # a question that cannot be asked costs only itself
                self._tell(Finished(number, None, f"{type(error).__name__}: {error}"))

    def _give_up(self, number: int) -> None:
        self.waiting.pop(number, None)
        self.pool.give_up(number)
        self.answered.add(number)

    def _tell(self, finished: Finished) -> None:
        self.answered.add(finished.number)

        def tell() -> None:
            self.outbox.append(finished)
            self._ready.set()

        self._events.call_soon_threadsafe(tell)
