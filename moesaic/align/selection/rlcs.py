"""Curriculum sampling by measured difficulty (RLCS, GLM-4.1V-Thinking): ask mostly what is answered rightly about half
of the time, because only there some answers are better than others.

    selection: {name: rlcs, pool: 64}

For every source it is kept, with decay, how much its questions were worth asking; a source that is half mastered and
half hopeless has middling answers on average and teaches nothing. Where there is a `pool` of questions that come again,
the share of right answers is kept for each. What nobody has tried is taken for promising, a belief that the first few
questions outweigh: a source that only fails costs some questions, not some steps. Beside that runs the share of
questions that taught something: with dynamic sampling, so many more are asked at once that enough of them will.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moesaic.align.examples import Mixture, Place
from moesaic.align.selection import Selection, Selector

PRIOR = 1.0  # questions' worth of belief in a source that was never tried; it fades like what was seen

if TYPE_CHECKING:
    from moesaic.align.rollouts.rollout import Sample
    from moesaic.model.transformer import Model


@dataclass(frozen=True)
class Rlcs(Selection):
    middle: float = 0.5  # the share of right answers that is best to learn from
    sharpness: float = 2.0  # how strongly the middle is preferred
    explore: float = 0.1  # weight that even a hopeless or a mastered question keeps, against 1 for the middle
    decay: float = 0.8  # of what was measured of a question, each time it is asked; of a source, per question
    pool: int = 0  # questions of each source that come again; 0: always new ones
    right: float = 1.0  # the reward of a right answer
    oversample: float = 3.0  # at most so many times as many questions as are needed

    def __post_init__(self) -> None:
        if not 0 < self.middle < 1 or not 0 < self.explore <= 1 or not 0 <= self.decay < 1 or self.right <= 0:
            raise ValueError("middle, explore and decay are between 0 and 1, and right is above 0")
        if self.pool < 0 or self.oversample < 1 or self.sharpness < 0:
            raise ValueError("pool and sharpness cannot be negative, and oversample is at least 1")

    def begin(self, examples: Mixture, model: Model, seed: int) -> Selector:
        return ByDifficulty(self, examples, seed)

    def weight(self, rate: float) -> float:
        """1 at the middle, falling to `explore` where all or no answers are right."""
        near = rate / self.middle if rate < self.middle else (1 - rate) / (1 - self.middle)
        return float(self.explore + (1 - self.explore) * near**self.sharpness)


class ByDifficulty(Selector):
    def __init__(self, options: Rlcs, examples: Mixture, seed: int) -> None:
        self.options, self.examples, self.seed = options, examples, seed
        count = len(examples.sources)
        # Of each source, added up and fading: questions that were asked, their shares of right answers, their weights.
        self.seen, self.right, self.worth = [PRIOR] * count, [PRIOR * options.middle] * count, [PRIOR] * count
        self.known: dict[Place, float] = {}
        self.taken = [0] * len(examples.sources)
        self.chosen = 0
        self.teaching = 1.0  # the share of questions that taught something

    @property
    def rates(self) -> list[float]:
        """The share of right answers to a question of each source."""
        return [right / seen for right, seen in zip(self.right, self.seen, strict=True)]

    @property
    def promises(self) -> list[float]:
        """The weight of a question of each source of which no more is known."""
        return [worth / seen for worth, seen in zip(self.worth, self.seen, strict=True)]

    def choose(self, count: int) -> list[Place]:
        return [self._one() for _ in range(count)]

    def needed(self, count: int) -> int:
        return min(math.ceil(count / max(self.teaching, 1e-6)), math.floor(count * self.options.oversample))

    def learn(self, place: Place, group: Sequence[Sample]) -> None:
        rate = sum(min(1.0, max(0.0, s.judged.total / self.options.right)) for s in group) / len(group)
        source, decay = place[0], self.options.decay
        # A source is many questions: one of them moves its rate little.
        slow = 1 - (1 - decay) / 8
        for sums, found in ((self.seen, 1.0), (self.right, rate), (self.worth, self.options.weight(rate))):
            sums[source] = slow * sums[source] + found
        if self.options.pool:
            self.known[place] = decay * self.known[place] + (1 - decay) * rate if place in self.known else rate
        taught = float(len({sample.judged.total for sample in group}) > 1)
        self.teaching = slow * self.teaching + (1 - slow) * taught

    def notes(self) -> dict[str, float]:
        names = {f"rate/{number}": rate for number, rate in enumerate(self.rates)} if len(self.seen) > 1 else {}
        return {"teaching": self.teaching} | names

    def state(self) -> dict[str, Any]:
        known = [[*place, rate] for place, rate in sorted(self.known.items())]
        return {
            "seen": self.seen,
            "right": self.right,
            "worth": self.worth,
            "known": known,
            "taken": self.taken,
            "chosen": self.chosen,
            "teaching": self.teaching,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self.seen, self.right, self.worth = list(state["seen"]), list(state["right"]), list(state["worth"])
        self.taken = list(state["taken"])
        self.known = {(source, number): rate for source, number, rate in state["known"]}
        self.chosen, self.teaching = state["chosen"], state["teaching"]

    def _one(self) -> Place:
        draw = random.Random(f"{self.seed} {self.chosen}")
        self.chosen += 1
        promises = self.promises
        weights = [share * promise for share, promise in zip(self.examples.weights, promises, strict=True)]
        (source,) = draw.choices(range(len(weights)), weights)
        if not self.options.pool:
            self.taken[source] += 1
            return source, self.taken[source] - 1
        places = [(source, number) for number in range(self.options.pool)]
        weight, known = self.options.weight, self.known
        chances = [weight(known[place]) if place in known else promises[source] for place in places]
        return draw.choices(places, chances)[0]
