"""The rollout buffer: what was submitted to rollout workers, and what has come back but is not yet trained on.

All of it is plain data, and part of a checkpoint: what was finished is kept, what was in flight is submitted again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from moesaic.align.examples import Place
from moesaic.align.rollouts.rollout import Sample


@dataclass
class Task:
    """A prompt whose group of completions was submitted."""

    number: int
    place: Place
    seed: int
    version: int  # of the weights when it was submitted; its completions are sampled from these or newer ones
    round: tuple[int, int] = (0, 0)  # the iteration it was submitted for, and which attempt of that
    tries: int = 0  # how often it was submitted again

    def plain(self) -> list[Any]:
        return [self.number, list(self.place), self.seed, self.version, list(self.round), self.tries]

    @classmethod
    def from_plain(cls, values: Sequence[Any]) -> Task:
        number, place, seed, version, round, tries = values
        return cls(number, (place[0], place[1]), seed, version, (round[0], round[1]), tries)


@dataclass
class Group:
    """All completions of one prompt."""

    task: Task
    samples: list[Sample]

    def mask_before(self, oldest: int) -> int:
        """Tokens sampled from weights older than version `oldest` are masked; how many more those are now."""
        masked = 0
        for sample in self.samples:
            before = sample.learned
            kept = [learn and version >= oldest for learn, version in zip(before, sample.versions, strict=True)]
            if kept != before:
                masked += sum(before) - sum(kept)
                sample.learn = kept
        return masked

    @property
    def trainable(self) -> bool:
        return any(any(sample.learned) for sample in self.samples)


@dataclass
class Buffer:
    """Tasks by number: in flight, or ready with their completions. A number is in one of the two, or was dropped."""

    in_flight: dict[int, Task] = field(default_factory=dict)
    ready: dict[int, Group] = field(default_factory=dict)
    numbers: int = 0  # given out so far

    def __len__(self) -> int:
        return len(self.in_flight) + len(self.ready)

    def submit(self, place: Place, seed: int, version: int, round: tuple[int, int]) -> Task:
        task = Task(self.numbers, place, seed, version, round)
        self.in_flight[task.number] = task
        self.numbers += 1
        return task

    def arrived(self, number: int, samples: list[Sample]) -> Group | None:
        """None for what nobody waits for any more: it was dropped, or has come already."""
        task = self.in_flight.pop(number, None)
        if task is None:
            return None
        group = self.ready[number] = Group(task, samples)
        return group

    def drop(self, number: int) -> None:
        self.in_flight.pop(number, None)
        self.ready.pop(number, None)

    def take(self, numbers: Sequence[int]) -> list[Group]:
        return [self.ready.pop(number) for number in numbers]

    def of_round(self, round: tuple[int, int]) -> tuple[list[int], list[int]]:
        """The numbers of a round that are in flight, and that are ready, in the order they were submitted."""
        in_flight = [number for number, task in self.in_flight.items() if task.round == round]
        return sorted(in_flight), sorted(n for n, group in self.ready.items() if group.task.round == round)

    def plain(self) -> dict[str, Any]:
        in_flight = [task.plain() for _, task in sorted(self.in_flight.items())]
        ready = [[g.task.plain(), [sample.plain() for sample in g.samples]] for _, g in sorted(self.ready.items())]
        return {"asked": in_flight, "ready": ready, "numbers": self.numbers}

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> Buffer:
        in_flight = [Task.from_plain(task) for task in values["asked"]]
        ready = [Group(Task.from_plain(t), [Sample.from_plain(s) for s in samples]) for t, samples in values["ready"]]
        return cls(
            {task.number: task for task in in_flight},
            {group.task.number: group for group in ready},
            values["numbers"],
        )
