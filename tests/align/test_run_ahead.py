"""Answers written ahead: they make the real ones quicker, leave nothing behind, and give way at once."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

import moesaic
from moesaic.align.examples import Mixture
from moesaic.align.rollouts.multi_turn import generate_multi_turn, multi_turn_rollouts
from moesaic.align.rollouts.pool import Rollout
from moesaic.align.rollouts.rollout import generate
from moesaic.align.rollouts.run_ahead import RunAhead
from moesaic.align.selection import Selection
from moesaic.errors import UserError
from moesaic.methods import Method, build
from moesaic.serve.core.drafters.router import DraftRouter
from moesaic.serve.core.drafters.suffix import Suffix
from moesaic.serve.core.engine import Engine
from moesaic.serve.parsers import Message
from moesaic.worlds.completions import requests_for
from moesaic.worlds.environments import Environment, Episode, Step
from moesaic.worlds.example import Example
from tests.align.made import assert_refused
from tests.align.test_selection import explored
from tests.matrix import SELECTIONS
from tests.serve.made import talking_model
from tests.waiting import until

SAMPLING = {"max_tokens": 40, "temperature": 1.0, "ignore_eos": True}
EXAMPLES = [Example(({"role": "user", "content": f"{n} + {n}"},), f"{2 * n}") for n in range(3)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return moesaic.load(talking_model(tmp_path_factory.mktemp("base")), threads=1)


def completions(group: int):
    """What begins the rollouts of a prompt that is completed once, as a worker does."""

    def start_group(engine, example, seed):
        return [Rollout(example, request) for request in requests_for(engine, example, group, SAMPLING, seed)]

    return start_group


def engine_of(model) -> Engine:
    return Engine(model, cache_bytes=4 << 20, drafter=DraftRouter.over(Suffix(), always=True), seed=0)


def test_what_was_written_ahead_is_guessed(model):
    """A random model never repeats itself by chance; with the seed of the real answer it was foreseen."""
    steps, answers = [], []
    for announce in ([], list(zip(EXAMPLES, (7, 8, 9), strict=True))):
        engine = engine_of(model)
        ahead = RunAhead(engine, completions(2))
        ahead.announce(announce)
        ahead.run(until=lambda: False)
        assert not engine.working and not engine.scheduler.requests and not ahead.coming
        assert ahead.work.generated == engine.counts.generated_tokens == len(announce) * 2 * 40
        assert ahead.work.steps == engine.counts.steps
        rollouts = generate(engine, EXAMPLES, 2, SAMPLING, [], [7, 8, 9])
        steps.append(rollouts.work.steps)
        answers.append([sample.tokens for group in rollouts.groups for sample in group])
    assert answers[0] == answers[1]  # and nothing is said otherwise for it
    assert steps[1] < 0.5 * steps[0]


@dataclass(frozen=True)
class Game(Environment):
    """Counts what is played in it, and what was given back."""

    turns: int = 3
    begun: list[Episode] = field(default_factory=list)
    closed: list[Episode] = field(default_factory=list)

    def begin(self, example: Example) -> Episode:
        self.begun.append(episode := Move(list(example.messages), [], self))
        return episode


@dataclass(eq=False)
class Move(Episode):
    game: Game

    def step(self, said: Message) -> Step:
        return Step([{"role": "user", "content": f"You said {len(said.content)} letters. Go on."}], reward=1.0)

    def close(self) -> None:
        self.game.closed.append(self)


STOPS = frozenset(range(20, 400, 8))  # so that a model that knows nothing ends its turns
TURNS = {"max_tokens": 40, "temperature": 1.0, "stop_tokens": STOPS}


def test_whole_episodes_are_played_ahead_and_guessed(model):
    """Every turn of them: what the world answers is the same, so the turns after it were foreseen too."""
    steps, answers = [], []
    for announce in ([], list(zip(EXAMPLES, (7, 8, 9), strict=True))):
        engine, game = engine_of(model), Game()
        begin = multi_turn_rollouts(game, 2, TURNS)
        ahead = RunAhead(engine, begin)
        ahead.announce(announce)
        ahead.run(until=lambda: False)
        assert not engine.working and not engine.scheduler.requests and not ahead.coming
        assert len(game.begun) == 2 * len(announce)
        rollouts = generate_multi_turn(engine, EXAMPLES, begin, [], [7, 8, 9])
        steps.append(rollouts.work.steps)
        answers.append([(sample.tokens, sample.learn) for group in rollouts.groups for sample in group])
        until(lambda game=game: len(game.closed) == len(game.begun))
    assert answers[0] == answers[1] and any(learn is not None for _, learn in answers[0])
    assert steps[1] < 0.6 * steps[0]


def test_an_episode_that_is_given_up_gives_its_world_back(model):
    engine, game = engine_of(model), Game()
    ahead = RunAhead(engine, multi_turn_rollouts(game, 2, TURNS))
    ahead.announce([(EXAMPLES[0], 7)])
    ahead.run(until=lambda: engine.counts.steps >= 3)
    assert engine.counts.steps == 3 and not engine.scheduler.requests and not engine.page_pool.in_use
    until(lambda: len(game.closed) == len(game.begun) == 2)


def test_it_gives_way_at_once(model):
    engine = engine_of(model)
    ahead = RunAhead(engine, completions(2))
    ahead.announce(list(zip(EXAMPLES, (7, 8, 9), strict=True)))
    ahead.run(until=lambda: engine.counts.steps >= 5)
    assert engine.counts.steps == 5 and not engine.scheduler.requests and not engine.page_pool.in_use
    assert len(ahead.coming) == 2
    ahead.announce([])
    ahead.run(until=lambda: False)
    assert engine.counts.steps == 5


def test_a_question_that_cannot_be_asked_is_passed_over(model):
    engine = engine_of(model)
    ahead = RunAhead(engine, completions(1))
    long = Example(({"role": "user", "content": "1 + " * 5000},), "1")
    with pytest.raises(UserError):
        requests_for(engine, long, 1, SAMPLING, 0)
    ahead.announce([(long, 1), (EXAMPLES[0], 2)])
    ahead.run(until=lambda: False)
    assert ahead.work.generated == 40


def test_without_a_drafter_it_is_refused(tmp_path):
    base = talking_model(tmp_path / "base")
    stage = '{name: policy, data: [{path: "builtin:sums"}], asynchronous: {run_ahead: true}}'
    assert_refused(tmp_path, base, stage, "run_ahead wants a drafter")


@pytest.mark.parametrize("name", SELECTIONS)
def test_a_look_at_what_comes_does_not_choose(model, name):
    examples = Mixture([[Example(({"role": "user", "content": str(n)},)) for n in range(99)]] * 2, [1.0, 2.0])
    more = {"share": 1.0} if name == "cropi" else {}  # so that more are chosen than are looked at
    selection = build(Method(name, SELECTIONS[name] | more), Selection, "test")
    selector = selection.begin(examples, model, 3, explored({}, []))
    first = selector.choose(4)
    state = selector.state()
    seen = selector.upcoming(4)
    assert selector.state() == state and seen == selector.choose(4) != first
