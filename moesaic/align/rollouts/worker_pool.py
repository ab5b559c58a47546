"""Rollout workers as the trainer sees them: started, given weights and questions, listened to, and begun again when
they die or fall silent. Ray is imported only here, when it is used."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from moesaic.align.rollouts.buffer import Task
from moesaic.align.rollouts.weight_sync import packed
from moesaic.align.rollouts.worker import Finished, News, Setup, Worker
from moesaic.errors import UserError
from moesaic.model.transformer import Model
from moesaic.worlds.example import Example

logger = logging.getLogger("moesaic.align")

DEATHS = 5  # of workers in a row, with nothing finished between them: it is not bad luck
STARTING = 300.0  # seconds a new worker may take before it is silent for too long
STORE = 128 << 20  # bytes of Ray's object store beside those for weights


@dataclass
class Counted:
    """What befell the crew since somebody last looked."""

    steps: int = 0
    generated: int = 0
    accepted: int = 0
    ahead: int = 0
    idle: float = 0.0
    deaths: int = 0
    requeued: int = 0


@dataclass(eq=False)
class WorkerHandle:
    """One worker."""

    number: int
    actor: Any = None
    listening: Any = None  # the reference of its next news
    heard: float = 0.0  # when it last said something
    begun: bool = False
    process: int = 0
    asked: dict[int, tuple[Task, Example, float]] = field(default_factory=dict)  # and when


class WorkerPool:
    """`patience`: seconds a ticket may take, and a worker may be silent; `retries`: how often a ticket is asked again
    before it is given up."""

    def __init__(self, setup: Setup, workers: int, patience: float, retries: int, address: str | None = None) -> None:
        self.setup, self.patience, self.retries, self.address = setup, patience, retries, address
        self.hands = [WorkerHandle(number) for number in range(workers)]
        self.plural = Counted()
        self._blocks: dict[int, Any] = {}  # version -> where its weights are
        self._deaths = 0
        self._ray: Any = None
        self._own = False

    @property
    def started(self) -> bool:
        return self._ray is not None

    def start(self, weights: int) -> None:
        """`weights`: bytes of one version of them."""
        try:
            import ray
        except ModuleNotFoundError:
            raise UserError("asynchronous", "needs Ray", "Install moesaic[cluster].") from None
        self._ray, self._own = ray, not ray.is_initialized()
        if self._own:
            options: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False, "logging_level": "error"}
            if self.address is None:
                options |= {"num_cpus": 1, "object_store_memory": STORE + 4 * weights}
                options |= {"address": "local"}
            else:
                options |= {"address": self.address}
            ray.init(**options)
        for hand in self.hands:
            self._begin(hand)

    def close(self) -> None:
        if not self.started:
            return
        for hand in self.hands:
            self._ray.kill(hand.actor)
            hand.asked.clear()
        self._blocks.clear()
        if self._own:
            self._ray.shutdown()
        self._ray = None

    def publish(self, version: int, model: Model) -> None:
        """New weights for everybody. Older ones are kept while an unanswered ticket was asked of them."""
        self._blocks[version] = self._ray.put(packed(model))
        oldest = min((t.version for hand in self.hands for t, _, _ in hand.asked.values()), default=version)
        self._blocks = {v: block for v, block in self._blocks.items() if v >= oldest}
        for hand in self.hands:
            self._renew(hand, version)

    def ask(self, asked: Sequence[tuple[Task, Example]]) -> None:
        """Each to the worker that has least to do."""
        shares: dict[int, list[tuple[Task, Example]]] = {}
        for ticket, example in asked:
            hand = min(self.hands, key=lambda hand: len(hand.asked))
            hand.asked[ticket.number] = (ticket, example, time.monotonic())
            shares.setdefault(hand.number, []).append((ticket, example))
        for number, share in shares.items():
            self.hands[number].actor.ask.remote(share)

    def foretell(self, coming: Sequence[tuple[Example, int]]) -> None:
        """Questions that will probably be asked next, with their seeds; to each worker those it will be asked, if all
        have equally much to do."""
        for hand in self.hands:
            hand.actor.foretell.remote(list(coming[hand.number :: len(self.hands)]))

    def forget(self) -> None:
        """Nobody waits any more for what is under way."""
        for hand in self.hands:
            for number in hand.asked:
                hand.actor.give_up.remote(number)
            hand.asked.clear()

    def poll(self, seconds: float) -> list[Finished]:
        """What was finished meanwhile; waits up to `seconds` for the first of it."""
        ray = self._ray
        ready, _ = ray.wait([hand.listening for hand in self.hands], num_returns=1, timeout=seconds)
        if len(self.hands) > 1 and ready:
            ready, _ = ray.wait([hand.listening for hand in self.hands], num_returns=len(self.hands), timeout=0)
        finished: list[Finished] = []
        for hand in self.hands:
            if hand.listening in ready:
                try:
                    finished += self._hear(hand, ray.get(hand.listening))
                except ray.exceptions.RayError as error:
                    finished += self._died(hand, str(error).strip().splitlines()[-1])
        return finished + self._impatient()

    def _hear(self, hand: WorkerHandle, news: News) -> list[Finished]:
        now = time.monotonic()
        if not hand.begun:  # its tickets' time begins now
            hand.asked = {number: (ticket, example, now) for number, (ticket, example, _) in hand.asked.items()}
        hand.heard, hand.begun, hand.process = now, True, news.process
        hand.listening = hand.actor.collect.remote()
        self.plural.steps += news.steps
        self.plural.generated += news.generated
        self.plural.accepted += news.accepted
        self.plural.ahead += news.ahead
        self.plural.idle += news.idle
        # What was asked again elsewhere may come twice; the first counts.
        finished = [one for one in news.finished if hand.asked.pop(one.number, None) is not None]
        if finished:
            self._deaths = 0
        return finished

    def _begin(self, hand: WorkerHandle) -> None:
        kind = self._ray.remote(Worker)
        resources = {"num_gpus": 1} if self.setup.device.startswith("cuda") else {"num_cpus": 0}
        hand.actor = kind.options(max_concurrency=1000, **resources).remote(self.setup)
        hand.actor.begin.remote()
        hand.listening = hand.actor.collect.remote()
        hand.heard, hand.begun = time.monotonic(), False

    def _renew(self, hand: WorkerHandle, version: int) -> None:
        after = [number for number, (ticket, _, _) in hand.asked.items() if ticket.version < version]
        hand.actor.renew.remote(version, [self._blocks[version]], after)

    def _died(self, hand: WorkerHandle, why: str) -> list[Finished]:
        """Begin it again, with the weights its tickets were asked of and those after; ask them again."""
        logger.error("rollout worker %d died and is begun again: %s", hand.number, why)
        self.plural.deaths += 1
        self._deaths += 1
        if self._deaths >= DEATHS:
            raise RuntimeError(f"{DEATHS} rollout workers died one after the other; the last: {why}")
        asked, hand.asked = hand.asked, {}
        self._ray.kill(hand.actor)
        self._begin(hand)
        finished = []
        for ticket, example, _ in asked.values():
            ticket.tries += 1
            if ticket.tries > self.retries + DEATHS:
                finished.append(Finished(ticket.number, None, "the workers that were asked died"))
                continue
            self.plural.requeued += 1
            hand.asked[ticket.number] = (ticket, example, time.monotonic())
        oldest = min([ticket.version for ticket, _, _ in hand.asked.values()] + [max(self._blocks, default=0)])
        for version in sorted(version for version in self._blocks if version >= oldest):
            self._renew(hand, version)
        if hand.asked:
            hand.actor.ask.remote([(ticket, example) for ticket, example, _ in hand.asked.values()])
        return finished

    def _impatient(self) -> list[Finished]:
        """Tickets that take too long are asked again, at last given up; so is a worker that is silent too long."""
        finished = []
        now = time.monotonic()
        for hand in self.hands:
            if now - hand.heard > (self.patience if hand.begun else max(self.patience, STARTING)):
                finished += self._died(hand, f"silent for {now - hand.heard:.0f} s")
                continue
            late = [entry for entry in hand.asked.values() if hand.begun and now - entry[2] > self.patience]
            for ticket, example, _ in late:
                del hand.asked[ticket.number]
                hand.actor.give_up.remote(ticket.number)
                ticket.tries += 1
                if ticket.tries > self.retries:
                    finished.append(Finished(ticket.number, None, f"not answered after {self.patience:g} s"))
                else:
                    self.plural.requeued += 1
                    self.ask([(ticket, example)])
        return finished
