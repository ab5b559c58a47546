"""Several worlds by turns, for one policy that learns in all of them (AgentTuning's and AgentBench's mix of tasks).

    environment: {name: several, worlds: [sql, cards, {name: house, size: full}]}
    moesaic evaluate DIR --suite agents environments=several settings='{several: {worlds: [sql, cards]}}'

Each world keeps its own limit of turns, and `mistakes` is what one says that names no other.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from moesaic.methods import Method, build, named
from moesaic.serve.parsers import Message
from moesaic.worlds.environments import Environment, Episode, Step
from moesaic.worlds.example import Example
from moesaic.worlds.text_actions import World, known_worlds


@dataclass(frozen=True)
class Several(World):
    turns: int = 0  # 0: as many as the longest of them needs
    worlds: tuple[dict[str, Any] | str, ...] = ("sql", "graph", "cards", "lateral", "house")

    def __post_init__(self) -> None:
        if not self.worlds:
            raise ValueError("worlds names no world")
        longest = max(world.turns for world in self.opened)
        object.__setattr__(self, "turns", min(self.turns or longest, longest))
        super().__post_init__()

    @cached_property
    def opened(self) -> list[World]:
        own = {"mistakes": self.mistakes}
        return [_world(Method(method.name, own | dict(method.options))) for method in named(self.worlds)]

    def check(self) -> None:
        for world in self.opened:
            world.check()

    def begin(self, example: Example) -> Episode:
        seed, number = example.facts["world"]
        own, which = divmod(number, len(self.opened))
        world = self.opened[which]
        inner = world.begin(Example((), facts={"world": [seed, own]}))
        return Limited(inner.messages, inner.tools, inner, min(world.turns, self.turns))


def _world(method: Method) -> World:
    there = [name for name in known_worlds() if name != "several"]
    if method.name not in there:
        raise ValueError(f"{method.name} is no world with tasks of its own; known: {', '.join(there)}")
    world = build(method, Environment, "environment: several")
    assert isinstance(world, World)
    return world


@dataclass
class Limited(Episode):
    """An episode that ends after so many turns."""

    inner: Episode
    left: int

    def step(self, said: Message) -> Step:
        step = self.inner.step(said)
        self.left -= 1
        if step.done or self.left > 0:
            return step
        return Step(step.messages, True, step.score, step.reward, step.invalid)

    def close(self) -> None:
        self.inner.close()
