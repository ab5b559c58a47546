"""Worlds judge what was done: each is right after what it asked for, and wrong after something else."""

from __future__ import annotations

import random
from typing import Any

import pytest

from moesaic.serve.parsers import Message
from moesaic.worlds.environments.browse import Browse, Browsing
from moesaic.worlds.environments.cards import Cards, Game
from moesaic.worlds.environments.graph import KnowledgeGraph, Questioning
from moesaic.worlds.environments.house import House, Household
from moesaic.worlds.environments.lateral import PARTS, Lateral, Riddle
from moesaic.worlds.environments.multihop import Multihop
from moesaic.worlds.environments.shell import KINDS as SHELL_KINDS
from moesaic.worlds.environments.shell import Shell, Terminal
from moesaic.worlds.environments.sql import KINDS as SQL_KINDS
from moesaic.worlds.environments.sql import Database, Session
from moesaic.worlds.searching import Searching
from moesaic.worlds.text_actions import Finished, World


def begun(world: World, number: int) -> Any:
    return world.simulation(random.Random(number), number)


def score(seen: object) -> float:
    assert isinstance(seen, Finished)
    return seen.score


def test_cards() -> None:
    """The last card of a game, for players who have won as much as these before."""
    for points, theirs, worth in ((0.0, 20.0, 0.0), (20.0, 0.0, 1.0), (7.0, 8.0, 0.5)):
        game = begun(Cards(), 2)  # the opponent plays its lowest card
        assert isinstance(game, Game)
        game.prizes, game.hand, game.theirs, game.points, game.their_points = [1], [6], [5], points, theirs
        assert score(game.act("play 6")) == worth


@pytest.mark.parametrize("number", range(5))
def test_graph(number: int) -> None:
    asked = begun(KnowledgeGraph(), number)
    assert isinstance(asked, Questioning)
    truth = [str(asked.asked.number)] if asked.asked.names is None else sorted(asked.asked.names)
    assert score(asked.act(f"answer({', '.join(truth)})")) == 1.0
    assert score(asked.act("answer(987)")) == 0.0
    assert score(asked.act(f"answer({', '.join([*truth, 'Nobody'])})")) == 0.0


def test_house() -> None:
    home = begun(House(), 1)  # something clean
    assert isinstance(home, Household) and home.goal.treatment == "clean"
    (thing,) = home.goal.kinds
    home.shut.clear()
    home.where[thing], home.room = None, home.room_of[home.goal.container]
    assert isinstance(home.act(f"put {thing} in {home.goal.container}"), str)  # still dirty
    home.act(f"take {thing} from {home.goal.container}")
    home.treated[thing].add("clean")
    assert score(home.act(f"put {thing} in {home.goal.container}")) == 1.0


@pytest.mark.parametrize("number", range(4))
def test_browse(number: int) -> None:
    task = begun(Browse(), number)
    assert isinstance(task, Browsing)
    assert score(task.finish("finish")) == score(task.finish("answer nobody")) == 0.0
    if task.answer is None:
        task.town.state = task.wanted
        assert score(task.finish("finish")) == 1.0
    else:
        assert score(task.finish(f"answer {task.answer}")) == 1.0


def test_lateral() -> None:
    riddle = begun(Lateral(), 0)
    assert isinstance(riddle, Riddle)
    assert score(riddle.act(f"solve {', '.join(riddle.hidden.values())}")) == 1.0
    everything = ", ".join(value for values in PARTS.values() for value in values)
    assert score(riddle.act(f"solve {everything}")) == 0.0


@pytest.mark.parametrize(
    ("world", "kinds"), [(Shell(), len(SHELL_KINDS)), (Database(), len(SQL_KINDS))], ids=["shell", "sql"]
)
def test_questions_and_changes(world: World, kinds: int) -> None:
    for number in range(kinds):
        task = begun(world, number)
        assert isinstance(task, Terminal | Session)
        assert score(task.act("finish")) == 0.0  # nothing was done, or nothing was to be done
        assert score(task.act("answer 987654")) == 0.0
        if task.task.answer is not None:
            assert score(task.act(f"answer {task.task.answer}")) == 1.0
        task.close()


def test_multihop() -> None:
    world = Multihop()
    for number in range(2):
        right, wrong = (world.begin(world.example(number)) for _ in range(2))
        assert isinstance(right, Searching)
        done = right.step(Message(f"Action: answer {right.asked.answers[0]}"))
        assert done.done and done.reward == 1.0
        assert wrong.step(Message("Action: answer somebody else")).reward == 0.0
