"""What the trainer has asked of rollout workers, and what has come back but is not yet learned from.

All of it is plain data, and part of a checkpoint: what was finished is kept, what was under way is asked again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from moesaic.align.examples import Place
from moesaic.align.rollouts.rollout import Sample


@dataclass
class Task:
    """A question whose group of answers was asked for."""

    number: int
    place: Place
    seed: int
    version: int  # of the weights when it was asked; its answers are sampled from these or newer ones
    round: tuple[int, int] = (0, 0)  # the iteration it was asked for, and which attempt of that
    tries: int = 0  # how often it was asked again

    def plain(self) -> list[Any]:
        return [self.number, list(self.place), self.seed, self.version, list(self.round), self.tries]

    @classmethod
    def from_plain(cls, values: Sequence[Any]) -> Task:
        number, place, seed, version, round, tries = values
        return cls(number, (place[0], place[1]), seed, version, (round[0], round[1]), tries)


@dataclass
class Group:
    """All answers to one question."""

    ticket: Task
    samples: list[Sample]

    def forget_before(self, oldest: int) -> int:
        """Tokens sampled by weights older than version `oldest` are not learned from; how many more those are now."""
        masked = 0
        for sample in self.samples:
            before = sample.learned
            kept = [learn and version >= oldest for learn, version in zip(before, sample.versions, strict=True)]
            if kept != before:
                masked += sum(before) - sum(kept)
                sample.learn = kept
        return masked

    @property
    def teachable(self) -> bool:
        return any(any(sample.learned) for sample in self.samples)


@dataclass
class Buffer:
    """Tickets by number: asked, or ready with their answers. A number is in one of the two, or has been dropped."""

    asked: dict[int, Task] = field(default_factory=dict)
    ready: dict[int, Group] = field(default_factory=dict)
    numbers: int = 0  # given out so far

    def __len__(self) -> int:
        return len(self.asked) + len(self.ready)

    def ask(self, place: Place, seed: int, version: int, round: tuple[int, int]) -> Task:
        ticket = Task(self.numbers, place, seed, version, round)
        self.asked[ticket.number] = ticket
        self.numbers += 1
        return ticket

    def arrived(self, number: int, samples: list[Sample]) -> Group | None:
        """None for what nobody waits for any more: it was dropped, or has come already."""
        ticket = self.asked.pop(number, None)
        if ticket is None:
            return None
        group = self.ready[number] = Group(ticket, samples)
        return group

    def drop(self, number: int) -> None:
        self.asked.pop(number, None)
        self.ready.pop(number, None)

    def take(self, numbers: Sequence[int]) -> list[Group]:
        return [self.ready.pop(number) for number in numbers]

    def of_round(self, round: tuple[int, int]) -> tuple[list[int], list[int]]:
        """The numbers of a round that are asked, and that are ready, in the order they were asked."""
        asked = [number for number, ticket in self.asked.items() if ticket.round == round]
        return sorted(asked), sorted(n for n, group in self.ready.items() if group.ticket.round == round)

    def plain(self) -> dict[str, Any]:
        ready = [[g.ticket.plain(), [sample.plain() for sample in g.samples]] for _, g in sorted(self.ready.items())]
        return {"asked": [t.plain() for _, t in sorted(self.asked.items())], "ready": ready, "numbers": self.numbers}

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> Buffer:
        asked = [Task.from_plain(ticket) for ticket in values["asked"]]
        ready = [Group(Task.from_plain(t), [Sample.from_plain(s) for s in samples]) for t, samples in values["ready"]]
        return cls(
            {ticket.number: ticket for ticket in asked},
            {group.ticket.number: group for group in ready},
            values["numbers"],
        )
