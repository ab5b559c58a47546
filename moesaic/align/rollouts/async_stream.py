"""Learning while answers are written elsewhere: rollout workers on Ray, and a trainer that takes groups as they come.

    asynchronous: {workers: 1, staleness: 1}

No token is learned from that was sampled by weights more than `staleness` versions old; a version is one set of
rollouts, that is `updates` steps of the optimizer. At most (1 + staleness) sets of questions are out at a time, so most
tokens keep that by themselves; older ones of an answer that took long are left out of the loss, and a group of which
nothing is left is dropped. What workers do with answers under way when new weights come is `on_update`:

    recompute   they go on under the new weights, their keys and values computed anew: each token's recorded
                log-probability is exactly that of the weights it was sampled from
    keep        they go on with keys and values of the old weights, which costs nothing and is not exact
    finish      they are finished under the old weights, and learned from in the order they were asked. Then nothing
                depends on who is how fast: the run gives the same bits every time, also if workers or the trainer
                were killed on the way; a checkpoint waits for what is under way

With `run_ahead`, a worker that has nothing to do answers what will probably be asked next, for the drafter to guess
from (`run_ahead.py`). What is learned is the same to the bit.

With staleness 0 the trainer waits for answers of its own weights: the same run, to the bit, as without workers.
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
from moesaic.align.rollouts.rollout import Rolled, Sample
from moesaic.align.rollouts.stream import PolicyStream, teaches
from moesaic.align.rollouts.worker import Finished
from moesaic.align.rollouts.worker_pool import Counted, WorkerPool
from moesaic.errors import UserError
from moesaic.kernels import hardware
from moesaic.model.transformer import Model
from moesaic.strict import STRICT
from moesaic.worlds.completions import seed_of

logger = logging.getLogger("moesaic.align")

PATIENCE = 0.5  # seconds between looks at who is late
FRUITLESS = 3  # rounds of questions of which every one failed, before the run does


class Asynchronous(BaseModel):
    """As a recipe says it."""

    model_config = STRICT

    workers: int = Field(1, ge=1)
    staleness: int = Field(1, ge=0)
    on_update: Literal["recompute", "keep", "finish"] = "recompute"
    patience: float = Field(600.0, gt=0)  # seconds for one group of answers, and for a worker to be silent
    retries: int = Field(2, ge=0)  # times a group that took too long is asked for again
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
class AsynchronousStream(PolicyStream):
    model: Model
    options: Asynchronous
    crew: WorkerPool
    buffer: Buffer = field(default_factory=Buffer)
    rounds: int = 0  # sets of questions asked in advance, one for each iteration to come
    plural: dict[str, float] = field(default_factory=dict)  # since the last set of rollouts
    problem: str = ""  # why the last question failed that did

    @property
    def trained(self) -> Model:
        return self.model

    @property
    def in_turn(self) -> bool:
        """Whether answers are learned from in the order they were asked for."""
        return self.options.staleness == 0 or self.options.on_update == "finish"

    @property
    def position(self) -> dict[str, Any]:
        if self.in_turn:  # what is under way could not be asked again: its weights will be gone
            self._until(lambda: not self.buffer.asked)
        elif self.crew.started:
            self._listen(0.0)
        return super().position | {"buffer": self.buffer.plain(), "rounds": self.rounds}

    def from_position(self, position: Mapping[str, Any] | None) -> Self:
        if position is None:
            return self
        if self.crew.started:
            self.crew.forget()
        buffer = Buffer.from_plain(position["buffer"])
        return replace(super().from_position(position), buffer=buffer, rounds=position["rounds"])

    def skip(self, past: int | Mapping[str, Any]) -> Self:
        """A rewound run asks new questions; nothing is left of what weights have said that are no more."""
        stream = super().skip(past)
        numbers, rounds = stream.buffer.numbers, stream.iteration
        return replace(stream, buffer=Buffer(numbers=numbers), rounds=rounds)

    def close(self) -> None:
        self.crew.close()

    # Answers

    def gather(self) -> tuple[list[list[Sample]], list[Rolled]]:
        self.version += 1
        self.plural = {"dropped": 0.0, "masked_tokens": 0.0, "failed": 0.0, "trainer_waited": 0.0}
        began = not self.crew.started
        if began:
            torch.set_num_threads(self.options.trainer_threads())
            self.crew.start(sum(t.numel() * t.element_size() for t in self.model.state_dict().values()))
        self.crew.plural = Counted()
        self.crew.publish(self.version, self.model)
        if began:
            self._ask_again()
        groups, every = self._in_turn() if self.in_turn else self._as_they_finish()
        crew = self.crew.plural
        every[0].steps, every[0].generated, every[0].accepted = crew.steps, crew.generated, crew.accepted
        self._note_ages(groups)
        if self.options.run_ahead:
            self._foretell()
        return groups, every

    def extra_notes(self) -> dict[str, float]:
        crew = self.crew.plural
        return self.plural | {
            "workers_waited": crew.idle / self.options.workers,
            "ran_ahead": float(crew.ahead),
            "worker_deaths": float(crew.deaths),
            "requeued": float(crew.requeued),
        }

    def _in_turn(self) -> tuple[list[list[Sample]], list[Rolled]]:
        """As without workers, but that the first questions of each iteration were asked `staleness` before it."""
        settings = self.settings
        while self.rounds <= self.iteration + self.options.staleness:
            self._ask(self.questions(), (self.rounds, 0))
            self.rounds += 1
        groups: list[list[Sample]] = []
        every: list[Rolled] = []
        fruitless = 0
        while len(every) < settings.dynamic:
            round = (self.iteration, len(every) + fruitless)
            if round[1]:
                self._ask(self.questions(), round)
            self._until(lambda round=round: not self.buffer.of_round(round)[0])
            found = [group for group in self.buffer.take(self.buffer.of_round(round)[1]) if self._young(group)]
            if not found:
                fruitless += 1
                self._check_fruit(fruitless)
                continue
            for group in found:
                self.selector.learn(group.ticket.place, group.samples)
            every.append(_rolled(found))
            groups += [g.samples for g in found if settings.dynamic == 1 or teaches(g.samples)]
            if len(groups) >= settings.prompts:
                break
        return groups[: settings.prompts] or every[-1].groups, every

    def _as_they_finish(self) -> tuple[list[list[Sample]], list[Rolled]]:
        """The oldest groups that teach something, once there are enough; as many questions are out as may be."""
        settings, wanted = self.settings, self.settings.prompts
        spare = wanted * (settings.dynamic - 1)  # groups that teach nothing may be replaced so often
        seen: list[Group] = []
        for number in [n for n, group in sorted(self.buffer.ready.items()) if not self._young(group)]:
            self.buffer.drop(number)
        failures = 0
        while True:
            missing = wanted * (1 + self.options.staleness) - len(self.buffer)
            if missing > 0:
                self._ask(self.selector.choose(missing), (self.iteration, 0))
            if len(self.buffer.ready) >= wanted:
                break
            arrived, failed = self._wait()
            failures = 0 if arrived else failures + failed
            self._check_fruit(failures // wanted)
            for group in arrived:
                seen.append(group)
                self.selector.learn(group.ticket.place, group.samples)
                if not self._young(group):
                    self.buffer.drop(group.ticket.number)
                elif settings.dynamic > 1 and spare and not teaches(group.samples):
                    self.buffer.drop(group.ticket.number)
                    spare -= 1
        taken = self.buffer.take(sorted(self.buffer.ready)[:wanted])
        known = {group.ticket.number for group in taken}
        replaced = [group for group in seen if group.ticket.number not in known | self.buffer.ready.keys()]
        return [group.samples for group in taken], [_rolled([*taken, *replaced])]

    def _ask(self, places: Sequence[Place], round: tuple[int, int]) -> None:
        asked = []
        for n, place in enumerate(places):
            parts = (*round, n) if self.in_turn else (self.buffer.numbers,)
            asked.append(self.buffer.ask(place, seed_of(self.settings.seed, *parts), self.version, round))
        self._send(asked)

    def _foretell(self) -> None:
        """Tell the workers what will be asked next, if nothing that is learned meanwhile changes it, and the seeds."""
        seed, first = self.settings.seed, self.buffer.numbers
        places = self.selector.upcoming(self.settings.prompts)
        parts = [(self.rounds, 0, n) if self.in_turn else (first + n,) for n in range(len(places))]
        self.crew.foretell([(self.examples[place], seed_of(seed, *part)) for place, part in zip(places, parts)])

    def _ask_again(self) -> None:
        """What was under way when the checkpoint was written; its weights are gone, so it is asked of the newest."""
        for ticket in self.buffer.asked.values():
            ticket.version = self.version
        self._send(list(self.buffer.asked.values()))

    def _send(self, tickets: Sequence[Task]) -> None:
        self.crew.ask([(ticket, self.examples[ticket.place]) for ticket in tickets])

    def _young(self, group: Group) -> bool:
        """See that nothing too old is learned from; False if that leaves nothing."""
        masked = group.forget_before(self.version - self.options.staleness)
        self.plural["masked_tokens"] += masked
        if group.teachable or not masked:
            return True
        self.plural["dropped"] += 1
        return False

    def _note_ages(self, groups: Sequence[Sequence[Sample]]) -> None:
        ages = [
            self.version - version
            for group in groups
            for sample in group
            for version, learn in zip(sample.versions, sample.learned, strict=True)
            if learn
        ]
        assert max(ages, default=0) <= self.options.staleness
        self.plural["staleness_max"] = float(max(ages, default=0))
        self.plural["staleness_mean"] = sum(ages) / max(1, len(ages))

    # Listening

    def _until(self, done: Any) -> None:
        while not done():
            self._wait()

    def _wait(self) -> tuple[list[Group], int]:
        began = time.monotonic()
        found = self._listen(PATIENCE)
        self.plural["trainer_waited"] = self.plural.get("trainer_waited", 0.0) + time.monotonic() - began
        return found

    def _listen(self, seconds: float) -> tuple[list[Group], int]:
        """Groups that have come, and the number of those that will not."""
        finished = self.crew.poll(seconds)
        groups = [group for one in finished if (group := self._received(one)) is not None]
        return groups, sum(one.samples is None for one in finished)

    def _received(self, one: Finished) -> Group | None:
        if one.samples is not None:
            return self.buffer.arrived(one.number, one.samples)
        logger.warning("a question was given up: %s", one.problem)
        self.plural["failed"] = self.plural.get("failed", 0.0) + 1
        self.problem = one.problem
        self.buffer.drop(one.number)
        return None

    def _check_fruit(self, fruitless: int) -> None:
        if fruitless >= FRUITLESS:
            raise UserError("align.stages", f"no question is answered; the last problem: {self.problem}")


def _rolled(groups: Sequence[Group]) -> Rolled:
    problems = [problem for group in groups for sample in group.samples for problem in sample.judged.problems]
    return Rolled([group.samples for group in groups], 0, 0, 0, problems)
