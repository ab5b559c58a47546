"""Greedy tokens by a search of the output matrix: as the whole matmul gives them, and misses are found and counted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import moesaic
from moesaic.model.transformer import Model
from moesaic.serve.core.drafters.model import DraftModel
from moesaic.serve.core.drafters.router import DraftRouter
from moesaic.serve.core.engine import Engine
from moesaic.serve.core.output_search import OutputSearch, SearchOptions
from moesaic.serve.core.stats import EngineStats
from tests.serve.made import talking_model

PROMPTS = ["The number 7 is", "yes or no, as you like it"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: Any) -> Model:
    return moesaic.load(talking_model(tmp_path_factory.mktemp("model") / "own"), threads=1)


def greedy(engine: Engine, **wishes: Any) -> list[list[int]]:
    answers = engine.generate(PROMPTS, max_tokens=24, temperature=0.0, ignore_eos=True, **wishes)
    return [answer.tokens for answer in answers]


@pytest.mark.parametrize("kind", ["scan", "graph"])
def test_tokens_are_those_of_the_whole_matmul(model: Model, kind: Any, monkeypatch: pytest.MonkeyPatch):
    plain, engine = Engine(model), Engine(model, output_search=SearchOptions(kind, check=4))
    expected = greedy(plain)
    whole = []
    logits_at = Model.logits_at
    monkeypatch.setattr(Model, "logits_at", lambda *given: whole.append(len(given[1])) or logits_at(*given))
    assert greedy(engine) == expected
    assert engine.search.searched == 48 and engine.search.missed == 0
    assert engine.search.checked == len(whole) == 48 // 4  # no others were computed in full
    # Where all logits are wanted they are there: drawn tokens, biases, log-probabilities.
    drawn = {"max_tokens": 12, "temperature": 1.0, "seed": 3, "ignore_eos": True}
    assert [a.tokens for a in engine.generate(PROMPTS, **drawn)] == [a.tokens for a in plain.generate(PROMPTS, **drawn)]
    reported, given = (
        one.generate(PROMPTS[:1], max_tokens=3, temperature=0.0, logprobs=2)[0] for one in (engine, plain)
    )
    assert [entry.top for entry in reported.logprobs] == [entry.top for entry in given.logprobs]


def test_misses_are_counted(model: Model, monkeypatch: pytest.MonkeyPatch):
    """A search that never finds the likeliest: every checked token is a miss, and the exact one is taken."""
    best = OutputSearch.best
    monkeypatch.setattr(OutputSearch, "best", lambda self, x: ([7] * len(best(self, x)[0]), [0.0] * len(x)))
    engine = Engine(model, output_search=SearchOptions("scan", check=1))
    assert greedy(engine) == greedy(Engine(model))
    stats = EngineStats.of(engine)
    assert stats.output_search_checked == 48 and stats.output_search_missed > 40


def test_a_draft_that_was_searched_is_verified_exactly(model: Model, tmp_path: Any, monkeypatch: pytest.MonkeyPatch):
    path = str(talking_model(tmp_path / "draft"))
    expected = greedy(Engine(model))
    drafter = DraftModel(path, length=4, output="scan")
    engine = Engine(model, drafter=DraftRouter.over(drafter, always=True))
    assert greedy(engine) == expected
    assert drafter.search.searched > 0 and engine.counts.accepted_tokens > 24  # the same weights: all are accepted
    wrong = np.array([11])
    monkeypatch.setattr(OutputSearch, "best", lambda self, x: (wrong.repeat(len(x)).tolist(), [-1.0] * len(x)))
    assert (
        greedy(Engine(model, drafter=DraftRouter.over(DraftModel(path, length=4, output="scan"), always=True)))
        == expected
    )
