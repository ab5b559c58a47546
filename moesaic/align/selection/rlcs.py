"""Curriculum sampling by measured difficulty (RLCS, GLM-4.1V-Thinking): sample mostly prompts with a pass
rate of about a half, because only there some completions are better than others.

    selection: {name: rlcs, pool: 64}

For every source it is kept, with decay, how much its prompts were worth sampling; a source that is half mastered and
half hopeless has a middling pass rate on average and no gradient. Where there is a `pool` of prompts that come again,
the pass rate is kept for each. What was never sampled is taken for promising, a belief that the first few prompts
outweigh: a source that only fails costs some prompts, not some steps. Beside that runs the share of prompts whose group
was informative: with dynamic sampling, so many more are sampled at once that enough of them will be.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moesaic.align.examples import Mixture, Place
from moesaic.align.rollouts.rollout import Sample
from moesaic.align.selection import Explore, Selection, Selector
from moesaic.model.transformer import Model

PRIOR = 1.0  # prompts' worth of belief in a source that was never sampled; it fades like what was measured


@dataclass(frozen=True)
class Rlcs(Selection):
    middle: float = 0.5  # the pass rate that is best to learn from
    sharpness: float = 2.0  # how strongly the middle is preferred
    explore: float = 0.1  # weight that even a hopeless or a mastered prompt keeps, against 1 for the middle
    decay: float = 0.8  # of what was measured of a prompt, each time it is sampled; of a source, per prompt
    pool: int = 0  # prompts of each source that come again; 0: always new ones
    right: float = 1.0  # the reward of a completion that passes
    oversample: float = 3.0  # at most so many times as many prompts as are needed

    def __post_init__(self) -> None:
        if not 0 < self.middle < 1 or not 0 < self.explore <= 1 or not 0 <= self.decay < 1 or self.right <= 0:
            raise ValueError("middle, explore and decay are between 0 and 1, and right is above 0")
        if self.pool < 0 or self.oversample < 1 or self.sharpness < 0:
            raise ValueError("pool and sharpness cannot be negative, and oversample is at least 1")

    def begin(self, examples: Mixture, model: Model, seed: int, explore: Explore) -> Selector:
        return ByDifficulty(self, examples, seed)

    def weight(self, rate: float) -> float:
        """1 at the middle, falling to `explore` where all or none pass."""
        near = rate / self.middle if rate < self.middle else (1 - rate) / (1 - self.middle)
        return float(self.explore + (1 - self.explore) * near**self.sharpness)


class ByDifficulty(Selector):
    def __init__(self, options: Rlcs, examples: Mixture, seed: int) -> None:
        self.options, self.examples, self.seed = options, examples, seed
        count = len(examples.sources)
        # Of each source, added up and fading: prompts that were sampled, their pass rates, their weights.
        self.seen, self.right, self.worth = [PRIOR] * count, [PRIOR * options.middle] * count, [PRIOR] * count
        self.known: dict[Place, float] = {}
        self.taken = [0] * len(examples.sources)
        self.chosen = 0
        self.informative = 1.0  # the share of prompts whose group was informative

    @property
    def rates(self) -> list[float]:
        """The pass rate of each source."""
        return [right / seen for right, seen in zip(self.right, self.seen, strict=True)]

    @property
    def promises(self) -> list[float]:
        """The weight of a prompt of each source of which no more is known."""
        return [worth / seen for worth, seen in zip(self.worth, self.seen, strict=True)]

    def choose(self, count: int) -> list[Place]:
        return [self._one() for _ in range(count)]

    def needed(self, count: int) -> int:
        return min(math.ceil(count / max(self.informative, 1e-6)), math.floor(count * self.options.oversample))

    def learn(self, place: Place, group: Sequence[Sample]) -> None:
        rate = sum(min(1.0, max(0.0, s.judged.total / self.options.right)) for s in group) / len(group)
        source, decay = place[0], self.options.decay
        # A source is many prompts: one of them moves its rate little.
        slow = 1 - (1 - decay) / 8
        for sums, found in ((self.seen, 1.0), (self.right, rate), (self.worth, self.options.weight(rate))):
            sums[source] = slow * sums[source] + found
        if self.options.pool:
            self.known[place] = decay * self.known[place] + (1 - decay) * rate if place in self.known else rate
        informative = float(len({sample.judged.total for sample in group}) > 1)
        self.informative = slow * self.informative + (1 - slow) * informative

    def notes(self) -> dict[str, float]:
        names = {f"rate/{number}": rate for number, rate in enumerate(self.rates)} if len(self.seen) > 1 else {}
        return {"teaching": self.informative} | names

    def state(self) -> dict[str, Any]:
        known = [[*place, rate] for place, rate in sorted(self.known.items())]
        return {
            "seen": self.seen,
            "right": self.right,
            "worth": self.worth,
            "known": known,
            "taken": self.taken,
            "chosen": self.chosen,
            "teaching": self.informative,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self.seen, self.right, self.worth = list(state["seen"]), list(state["right"]), list(state["worth"])
        self.taken = list(state["taken"])
        self.known = {(source, number): rate for source, number, rate in state["known"]}
        self.chosen, self.informative = state["chosen"], state["teaching"]

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
