"""Which prompts are sampled next. Each way of choosing is one file, found by its name.

    selection: {name: rlcs, middle: 0.5}

A selection is options; its selector has the state: what was chosen, and what came of it. The state is plain JSON and
goes with every checkpoint, so a resumed run samples the prompts it would have sampled.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from moesaic.align.examples import Mixture, Place
from moesaic.align.rollouts.rollout import Sample
from moesaic.model.transformer import Model
from moesaic.worlds.example import Example

# Groups of completions with their rewards, by the policy as it is now, of prompts and a seed for each. Nothing is
# learned from them: they are for choosing only.
Explore = Callable[[Sequence[Example], Sequence[int]], list[list[Sample]]]


class Selector:
    """Chooses, and learns from what came of it."""

    def choose(self, count: int) -> list[Place]:
        raise NotImplementedError

    def upcoming(self, count: int) -> list[Place]:
        """What would be chosen next, were nothing learned until then; looking does not choose."""
        before = copy.deepcopy(self.state())
        places = self.choose(count)
        self.restore(before)
        return places

    def needed(self, count: int) -> int:
        """How many prompts to sample at once so that `count` of them are informative (dynamic sampling)."""
        return count

    def learn(self, place: Place, group: Sequence[Sample]) -> None:
        """All completions of a prompt that was chosen."""

    def state(self) -> dict[str, Any]:
        raise NotImplementedError

    def restore(self, state: Mapping[str, Any]) -> None:
        raise NotImplementedError

    def notes(self) -> dict[str, float]:
        """For the record of the step."""
        return {}


@dataclass(frozen=True)
class Selection:
    """`model` is the trainer's own: whenever something is chosen, it has the weights of then."""

    on_ranks: ClassVar[bool] = True  # whether a rank with a share of the model chooses as the others do

    def check(self, own_tasks: bool) -> None:
        """Validate what can be, before any stage is run; `own_tasks`: the prompts are an environment's."""

    def begin(self, examples: Mixture, model: Model, seed: int, explore: Explore) -> Selector:
        raise NotImplementedError
