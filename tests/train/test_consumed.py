"""Schedules that count tokens: where early batches are smaller, the rate is that of the text seen, not of the steps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from moesaic.data.stream import batch_share
from moesaic.recipe import Recipe, load_recipe
from moesaic.train.consumed import Consumed, fit_tokens, token_cost
from moesaic.train.validate import rates

RECIPE = """
data: {sequence_length: 256, length_warmup: {steps: 80, start: 32, batch: shrink}}
train: {steps: 120, batch_tokens: 4096, warmup_steps: 4}
schedule: {name: linear, floor: 0.0}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    return load_recipe(tmp_path / "recipe.yaml")


def by_tokens(recipe: Recipe) -> tuple[np.ndarray, np.ndarray]:
    """The rate of every step, and the share of a batch that it sees."""
    settings, cost = recipe.train, token_cost(recipe)
    consumed = Consumed(settings.steps, settings.warmup_steps, [cost] if cost is not None else [])
    curve = rates(recipe)
    steps = range(settings.steps)
    places = [consumed.place(step) for step in steps]
    return curve[places], np.array([batch_share(step, recipe) for step in steps])


def test_the_rate_is_that_of_the_text_seen(recipe: Recipe) -> None:
    found, shares = by_tokens(recipe)
    after = slice(recipe.train.warmup_steps, None)
    seen = np.cumsum(shares[after]) - shares[after]
    expected = 1 - seen / shares[after].sum()  # what is linear in tokens
    assert np.abs(found[after] - expected).max() < 1.5 / recipe.train.steps
    assert (np.diff(found[after]) <= 0).all()
    # The mean rate of a token is that of the schedule, as with full batches; in steps it would be a fifth too low.
    plain = rates(recipe)
    assert np.average(found[after], weights=shares[after]) == pytest.approx(plain[after].mean(), rel=0.02)
    assert np.average(plain[after], weights=shares[after]) < 0.85 * plain[after].mean()


def test_batches_of_one_size_and_rates_in_steps_are_as_they_were(recipe: Recipe) -> None:
    warmup = recipe.data.length_warmup
    assert warmup is not None
    for changed in ({"batch": "same"}, {"token_rate": False}):
        other = recipe.changed(data={"length_warmup": warmup.model_copy(update=changed)})
        assert np.array_equal(by_tokens(other)[0], rates(other))
    costs = [lambda step: 0.5 if step < 50 else 1.0]
    assert Consumed(100, 0, costs).place(50) == int(25 / 75 * 100)  # random-LTD's layer-tokens, counted the same way


@pytest.mark.parametrize("tokens", [1, 512, 513, 100_000, 200_000, 4096 * 300])
def test_a_length_in_tokens_takes_as_many_steps(recipe: Recipe, tokens: int) -> None:
    asked = recipe.changed(train={"tokens": tokens})
    steps = fit_tokens(asked).train.steps
    seen = [round(4096 * batch_share(step, recipe)) for step in range(steps)]
    assert sum(seen) >= tokens > sum(seen[:-1])
    assert fit_tokens(fit_tokens(asked)).train.steps == steps  # a run that is resumed counts the same
    assert fit_tokens(recipe) is recipe
