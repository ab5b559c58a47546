"""Every prompt in its turn, the sources mixed by their weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moesaic.align.examples import Mixture, Place
from moesaic.align.selection import Explore, Selection, Selector
from moesaic.model.transformer import Model


@dataclass(frozen=True)
class Uniform(Selection):
    def begin(self, examples: Mixture, model: Model, seed: int, explore: Explore) -> Selector:
        return InTurn(examples)


class InTurn(Selector):
    def __init__(self, examples: Mixture) -> None:
        self.examples = examples.at([0] * len(examples.sources))

    def choose(self, count: int) -> list[Place]:
        return [self.examples.turn() for _ in range(count)]

    def state(self) -> dict[str, Any]:
        return {"taken": list(self.examples.taken)}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.examples = self.examples.at(state["taken"])
