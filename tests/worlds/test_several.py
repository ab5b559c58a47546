"""Several worlds by turns: every one is as it is alone, and has its own limits."""

from __future__ import annotations

import pytest

from moesaic.errors import UserError
from moesaic.evaluate.suites import SuiteContext
from moesaic.evaluate.suites.agents import Agents
from moesaic.methods import Method, build
from moesaic.serve.parsers import Message
from moesaic.worlds.environments import Environment
from moesaic.worlds.environments.cards import Cards
from moesaic.worlds.environments.house import House
from moesaic.worlds.environments.several import Several
from moesaic.worlds.text_actions import WorldExamples
from tests.evaluate.test_agents import Solving

WORLDS = ("cards", {"name": "house", "turns": 3})


def test_tasks_are_of_every_world_in_turn() -> None:
    world = Several(worlds=WORLDS)
    examples = WorldExamples(world, 0)
    alone = [WorldExamples(Cards(), 0), WorldExamples(House(), 0)]
    assert [examples[n].messages for n in range(6)] == [alone[n % 2][n // 2].messages for n in range(6)]
    assert world.turns == Cards().turns == 10


def test_every_world_has_its_own_limits() -> None:
    world = Several(worlds=WORLDS, mistakes=2)
    house = world.begin(world.example(1))
    assert [house.step(Message("Action: look")).done for _ in range(3)] == [False, False, True]
    cards = world.begin(world.example(0))
    assert [cards.step(Message("Action: look")).done for _ in range(2)] == [False, True]
    assert Several(worlds=WORLDS, turns=2).turns == 2


def test_the_suite_asks_in_them() -> None:
    settings = {"several": {"worlds": ["sql", "cards", "graph"]}}
    found = Agents("several", examples=6, settings=settings).run(None, SuiteContext(backend=Solving()))
    assert found["score"] == 1.0


@pytest.mark.parametrize(
    ("worlds", "message"),
    [
        ([], "names no world"),
        (["nowhere"], "no world with tasks of its own; known: browse"),
        (["tool_use"], "no world with tasks of its own"),
        (["several"], "no world with tasks of its own"),
        ([{"name": "cards", "size": "huge"}], "size is one of"),
    ],
)
def test_what_is_no_world_is_refused(worlds: list[object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        build(Method("several", {"worlds": worlds}), Environment, "test")
