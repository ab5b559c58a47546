"""A mixture read from losses whose law is known."""

from __future__ import annotations

import numpy as np
import pytest

from moesaic.data.mixture_regression import draw_weights, fit, recommend
from moesaic.errors import UserError

TOKENS_G = np.array([6e6, 2e6, 1e6, 1e6])
TRUE_G = np.array([0.2, 0.1, 0.6, 0.1])  # the best mixture: of the small third group more than it has


def loss(weights_NG: np.ndarray) -> np.ndarray:
    return 3.0 - (TRUE_G * np.log(weights_NG + 0.02)).sum(1)


def test_the_recommended_mixture_is_near_the_best_and_beats_every_proxy_and_the_data_as_it_comes() -> None:
    weights_NG = draw_weights(TOKENS_G, 24, seed=0)
    assert weights_NG.shape == (24, 4) and weights_NG.sum(1) == pytest.approx(1)
    noisy_N = loss(weights_NG) + np.random.default_rng(0).normal(0, 0.01, 24)
    fitted = fit(weights_NG, noisy_N)
    best_G = recommend(fitted, TOKENS_G, run_tokens=1_000_000)
    assert best_G.sum() == pytest.approx(1) and best_G.argmax() == 2
    natural_G = TOKENS_G / TOKENS_G.sum()
    best, natural = loss(best_G[None])[0], loss(natural_G[None])[0]
    assert best < natural - 0.3 and best < loss(weights_NG).min() + 0.02
    assert best < loss(TRUE_G[None])[0] + 0.05
    assert fitted.rank > 0.95 and fitted.error < 0.05


def test_losses_that_say_nothing_are_told() -> None:
    weights_NG = draw_weights(TOKENS_G, 24, seed=0)
    fitted = fit(weights_NG, np.random.default_rng(1).normal(3, 0.1, 24))
    assert fitted.rank < 0.5 and fitted.error > 0.05
    with pytest.raises(UserError, match="4 proxies"):
        fit(weights_NG[:3], np.zeros(3))


def test_no_group_is_repeated_more_often_than_allowed() -> None:
    weights_NG = draw_weights(TOKENS_G, 24, seed=0)
    fitted = fit(weights_NG, loss(weights_NG))
    best_G = recommend(fitted, TOKENS_G, run_tokens=20_000_000, max_epochs=4)
    assert (best_G * 20e6 / TOKENS_G <= 4 + 1e-9).all() and best_G[2] > 0.12
