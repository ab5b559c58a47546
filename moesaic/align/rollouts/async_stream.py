"""Asynchronous RL: workers on Ray sample rollouts while the trainer learns, and it takes groups as they come.

    asynchronous: {workers: 1, staleness: 1}

No token is trained on that was sampled from weights more than `staleness` versions old; a version is one set of
rollouts, that is `updates` steps of the optimizer. At most (1 + staleness) sets of prompts are in flight at a time, so
most tokens keep that by themselves; older ones of a completion that took long are masked in the loss, and a group of
which nothing is left is dropped. What workers do with completions in flight when new weights come is `on_update`:

    recompute   they go on under the new weights, their keys and values computed anew: each token's recorded
                log-probability is exactly that of the weights it was sampled from
    keep        they go on with keys and values of the old weights, which costs nothing and is not exact
    finish      they are finished under the old weights, and trained on in the order they were submitted. Then nothing
                depends on who is how fast: the run gives the same bits every time, also if workers or the trainer
                were killed on the way; a checkpoint waits for what is in flight

With `run_ahead`, an idle worker completes what will probably be submitted next, for the drafter to draft from
(`run_ahead.py`). What is learned is the same to the bit.

With staleness 0 the trainer waits for completions of its own weights: the same run, to the bit, as without workers.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

import torch
from pydantic import BaseModel, Field

from moesaic.align.examples import Place
from moesaic.align.rollouts.buffer import Buffer, Group, Task
from moesaic.align.rollouts.engine_work import EngineWork
from moesaic.align.rollouts.rollout import Rollouts, Sample
from moesaic.align.rollouts.stream import PolicyStream, informative
from moesaic.align.rollouts.worker import Finished
from moesaic.align.rollouts.worker_pool import PoolCounts, WorkerPool
from moesaic.errors import UserError
from moesaic.kernels import hardware
from moesaic.strict import STRICT
from moesaic.worlds.completions import seed_of

logger = logging.getLogger("moesaic.align")

POLL_SECONDS = 0.5  # between looks at who is late
COUNTED = {"dropped": 0.0, "masked_tokens": 0.0, "failed": 0.0, "trainer_waited": 0.0}
MAX_FAILED_ROUNDS = 3  # rounds of prompts of which every one failed, before the run does


class AsyncOptions(BaseModel):
    """As a recipe says it."""

    model_config = STRICT

    workers: int = Field(1, ge=1)
    staleness: int = Field(1, ge=0)
    on_update: Literal["recompute", "keep", "finish"] = "recompute"
    patience: float = Field(600.0, gt=0)  # seconds for one group of completions, and for a worker to be silent
    retries: int = Field(2, ge=0)  # times a group that took too long is submitted again
    run_ahead: bool = False  # fill the drafter's trees in idle time
    threads: int = Field(0, ge=0)  # of a worker; 0: a fair share of this machine's
    address: str | None = None  # of a Ray cluster; none: one is started here, for this run

    def worker_threads(self) -> int:
        if self.staleness == 0:  # either the trainer computes or the workers do
            return self.threads or max(1, hardware.threads() // self.workers)
        return self.threads or max(1, hardware.threads() // (self.workers + 1))

    def trainer_threads(self) -> int:
        if self.staleness == 0 or self.address is not None:
            return hardware.threads()
        return max(1, hardware.threads() - self.workers * self.worker_threads())


@dataclass(kw_only=True)
class AsyncRolloutStream(PolicyStream):
    options: AsyncOptions
    workers: WorkerPool
    buffer: Buffer = field(default_factory=Buffer)
    rounds: int = 0  # sets of prompts submitted in advance, one for each iteration to come
    counts: dict[str, float] = field(default_factory=lambda: dict(COUNTED))  # since they were noted, also while saving
    problem: str = ""  # why the last prompt failed that did

    @property
    def in_turn(self) -> bool:
        """Whether completions are trained on in the order they were submitted."""
        return self.options.staleness == 0 or self.options.on_update == "finish"

    @property
    def position(self) -> dict[str, Any]:
        if self.in_turn:  # what is in flight could not be submitted again: its weights will be gone
            self._until(lambda: not self.buffer.in_flight)
        elif self.workers.started:
            self._poll(0.0)
        return super().position | {"buffer": self.buffer.plain(), "rounds": self.rounds}

    def from_position(self, position: Mapping[str, Any] | None) -> Self:
        if position is None:
            return self
        if self.workers.started:
            self.workers.abort_all()
        buffer = Buffer.from_plain(position["buffer"])
        return replace(super().from_position(position), buffer=buffer, rounds=position["rounds"])

    def skip(self, past: int | Mapping[str, Any]) -> Self:
        """A rewound run samples new prompts; nothing is left of what weights have sampled that are no more."""
        stream = super().skip(past)
        numbers, rounds = stream.buffer.numbers, stream.iteration
        return replace(stream, buffer=Buffer(numbers=numbers), rounds=rounds)

    def close(self) -> None:
        self.workers.close()

    # -- rollouts

    def sync_weights(self) -> None:
        starting = not self.workers.started
        if starting:
            if self.world.ranks == 1:  # several have their threads from who started them
                torch.set_num_threads(self.options.trainer_threads())
            self.workers.start()
        super().sync_weights()
        if starting:
            self._resubmit()

    def collect_rollouts(self) -> tuple[list[list[Sample]], list[Rollouts]]:
        groups, rounds = self._in_turn() if self.in_turn else self._as_they_finish()
        rounds[0].work = self.workers.counts.work
        self._note_staleness(groups)
        if self.options.run_ahead:
            self._announce()
        return groups, rounds

    def extra_notes(self) -> dict[str, float]:
        counts, self.workers.counts = self.workers.counts, PoolCounts()
        own, self.counts = self.counts, dict(COUNTED)
        return own | {
            "workers_waited": counts.idle / self.options.workers,
            "ran_ahead": float(counts.ahead),
            "worker_deaths": float(counts.deaths),
            "requeued": float(counts.requeued),
        }

    def _in_turn(self) -> tuple[list[list[Sample]], list[Rollouts]]:
        """As without workers, but that the first prompts of each iteration were submitted `staleness` before it."""
        settings = self.settings
        while self.rounds <= self.iteration + self.options.staleness:
            self._submit(self.next_prompts(), (self.rounds, 0))
            self.rounds += 1
        groups: list[list[Sample]] = []
        rounds: list[Rollouts] = []
        failed = 0
        while len(rounds) < settings.dynamic:
            round = (self.iteration, len(rounds) + failed)
            if round[1]:
                self._submit(self.next_prompts(), round)
            self._until(lambda round=round: not self.buffer.of_round(round)[0])
            found = [group for group in self.buffer.take(self.buffer.of_round(round)[1]) if self._fresh(group)]
            if not found:
                failed += 1
                self._check_failed(failed)
                continue
            for group in found:
                self.selector.learn(group.task.place, group.samples)
            rounds.append(_rollouts(found))
            groups += [g.samples for g in found if settings.dynamic == 1 or informative(g.samples, settings.each)]
            if len(groups) >= settings.prompts:
                break
        return groups[: settings.prompts] or rounds[-1].groups, rounds

    def _as_they_finish(self) -> tuple[list[list[Sample]], list[Rollouts]]:
        """The oldest informative groups, once there are enough; as many prompts are in flight as may be."""
        settings, wanted = self.settings, self.settings.prompts
        spare = wanted * (settings.dynamic - 1)  # groups that are not informative may be replaced so often
        seen: list[Group] = []
        for number in [n for n, group in sorted(self.buffer.ready.items()) if not self._fresh(group)]:
            self.buffer.drop(number)
        failures = 0
        while True:
            missing = wanted * (1 + self.options.staleness) - len(self.buffer)
            if missing > 0:
                self._submit(self.selector.choose(missing), (self.iteration, 0))
            if len(self.buffer.ready) >= wanted:
                break
            arrived, failed = self._wait()
            failures = 0 if arrived else failures + failed
            self._check_failed(failures // wanted)
            for group in arrived:
                seen.append(group)
                self.selector.learn(group.task.place, group.samples)
                if not self._fresh(group):
                    self.buffer.drop(group.task.number)
                elif settings.dynamic > 1 and spare and not informative(group.samples, settings.each):
                    self.buffer.drop(group.task.number)
                    spare -= 1
        taken = self.buffer.take(sorted(self.buffer.ready)[:wanted])
        known = {group.task.number for group in taken}
        replaced = [group for group in seen if group.task.number not in known | self.buffer.ready.keys()]
        return [group.samples for group in taken], [_rollouts([*taken, *replaced])]

    def _submit(self, places: Sequence[Place], round: tuple[int, int]) -> None:
        tasks = []
        for n, place in enumerate(places):
            parts = (*round, n) if self.in_turn else (self.buffer.numbers,)
            tasks.append(self.buffer.submit(place, seed_of(self.settings.seed, *parts), self.version, round))
        self._send(tasks)

    def _announce(self) -> None:
        """What will be submitted next, if nothing that is learned meanwhile changes it, and the seeds."""
        seed, first = self.settings.seed, self.buffer.numbers
        places = self.selector.upcoming(self.settings.prompts)
        parts = [(self.rounds, 0, n) if self.in_turn else (first + n,) for n in range(len(places))]
        self.workers.announce([(self.examples[place], seed_of(seed, *part)) for place, part in zip(places, parts)])

    def _resubmit(self) -> None:
        """What was in flight when the checkpoint was written; its weights are gone, so the newest take it on."""
        for task in self.buffer.in_flight.values():
            task.version = self.version
        self._send(list(self.buffer.in_flight.values()))

    def _send(self, tasks: Sequence[Task]) -> None:
        self.workers.submit([(task, self.examples[task.place]) for task in tasks])

    def _fresh(self, group: Group) -> bool:
        """See that nothing too old is trained on; False if that leaves nothing."""
        masked = group.mask_before(self.version - self.options.staleness)
        self.counts["masked_tokens"] += masked
        if group.trainable or not masked:
            return True
        self.counts["dropped"] += 1
        return False

    def _note_staleness(self, groups: Sequence[Sequence[Sample]]) -> None:
        ages = [
            self.version - version
            for group in groups
            for sample in group
            for version, learn in zip(sample.versions, sample.learned, strict=True)
            if learn
        ]
        assert max(ages, default=0) <= self.options.staleness
        self.counts["staleness_max"] = float(max(ages, default=0))
        self.counts["staleness_mean"] = sum(ages) / max(1, len(ages))

    # -- polling the workers

    def _until(self, done: Any) -> None:
        while not done():
            self._wait()

    def _wait(self) -> tuple[list[Group], int]:
        began = time.monotonic()
        found = self._poll(POLL_SECONDS)
        self.counts["trainer_waited"] += time.monotonic() - began
        return found

    def _poll(self, seconds: float) -> tuple[list[Group], int]:
        """Groups that have come, and the number of those that will not."""
        finished = self.workers.poll(seconds)
        groups = [group for one in finished if (group := self._received(one)) is not None]
        return groups, sum(one.samples is None for one in finished)

    def _received(self, one: Finished) -> Group | None:
        if one.samples is not None:
            return self.buffer.arrived(one.number, one.samples)
        logger.warning("a prompt was given up: %s", one.problem)
        self.counts["failed"] += 1
        self.problem = one.problem
        self.buffer.drop(one.number)
        return None

    def _check_failed(self, rounds: int) -> None:
        if rounds >= MAX_FAILED_ROUNDS:
            raise UserError("align.stages", f"no prompt is completed; the last problem: {self.problem}")


def _rollouts(groups: Sequence[Group]) -> Rollouts:
    problems = [problem for group in groups for sample in group.samples for problem in sample.judged.problems]
    return Rollouts([group.samples for group in groups], EngineWork(), problems)
