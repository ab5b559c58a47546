"""RegMix (Liu et al. 2024): which weights train best, by a regression from the weights of small runs to their losses.

    weights_NG = draw_weights(tokens_G, 24, seed=0)         # of as many proxies, around the data as it comes
    fitted = fit(weights_NG, losses_N)
    fitted.error, fitted.rank                               # of losses that were left out of the fit, one by one
    best_G = recommend(fitted, tokens_G, run_tokens=...)

A loss is read as a sum over groups of a function of their weight, with diminishing returns: the first tenth of a group
is worth more than the last. Of three such functions and of several strengths of ridge, those are taken that best
predict each loss from all others. The recommendation is the mean of the best of many mixtures drawn like those of the
proxies (a regression must not be believed far from what it has seen), which repeat no group more than `max_epochs`
times.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.stats import spearmanr

from moesaic.errors import UserError

FORMS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "linear": lambda weights: weights,
    "root": np.sqrt,
    "log": lambda weights: np.log(weights + 0.02),
}
RIDGES = tuple(10.0**power for power in range(-4, 3))
CANDIDATES, AVERAGED = 20_000, 100


@dataclass(frozen=True)
class Regression:
    form: str
    ridge: float
    center_G: np.ndarray
    spread_G: np.ndarray
    slopes_G: np.ndarray
    level: float
    error: float  # root of the mean square, of losses that were left out
    rank: float  # their rank correlation with what was predicted

    def predict(self, weights_NG: np.ndarray) -> np.ndarray:
        loss_N: np.ndarray = self.level + (FORMS[self.form](weights_NG) - self.center_G) / self.spread_G @ self.slopes_G
        return loss_N


def draw_weights(tokens_G: np.ndarray, count: int, seed: int) -> np.ndarray:
    """Mixtures around the share of tokens: Dirichlet, from near to it to nearly a single group. Shares are tempered, so
    that a small group is at times a large part."""
    chance = np.random.default_rng(seed)
    share_G = np.sqrt(tokens_G / tokens_G.sum())
    share_G /= share_G.sum()
    strength_N = np.exp(chance.uniform(np.log(0.5), np.log(5), count)) * len(share_G)
    drawn_NG = chance.gamma(strength_N[:, None] * share_G) + 1e-9
    weights_NG: np.ndarray = np.round(drawn_NG / drawn_NG.sum(1, keepdims=True), 4)
    return weights_NG / weights_NG.sum(1, keepdims=True)


def fit(weights_NG: np.ndarray, losses_N: np.ndarray) -> Regression:
    if len(losses_N) < 4:
        raise UserError("--proxies", f"{len(losses_N)} losses say nothing about a mixture", "Train 4 proxies or more.")
    found = [_fitted(form, ridge, weights_NG, losses_N) for form in FORMS for ridge in RIDGES]
    return min(found, key=lambda regression: regression.error)


def _fitted(form: str, ridge: float, weights_NG: np.ndarray, losses_N: np.ndarray) -> Regression:
    x_NG = FORMS[form](weights_NG)
    center_G, spread_G = x_NG.mean(0), x_NG.std(0) + 1e-9
    x_NG = (x_NG - center_G) / spread_G
    level = float(losses_N.mean())
    solve_GN = np.linalg.solve(x_NG.T @ x_NG + ridge * np.eye(x_NG.shape[1]), x_NG.T)
    hat_NN = x_NG @ solve_GN + 1 / len(losses_N)  # from losses to what is predicted of them, the mean included
    miss_N = (losses_N - hat_NN @ losses_N) / (1 - np.diag(hat_NN)).clip(1e-6)  # as if each had been left out
    rank = float(spearmanr(losses_N - miss_N, losses_N).statistic) if np.ptp(losses_N) > 0 else 0.0
    error = float(np.sqrt((miss_N**2).mean()))
    return Regression(form, ridge, center_G, spread_G, solve_GN @ (losses_N - level), level, error, rank)


def recommend(
    fitted: Regression, tokens_G: np.ndarray, *, run_tokens: int, max_epochs: float = 4.0, seed: int = 0
) -> np.ndarray:
    """The weights, which sum to one."""
    candidates_NG = draw_weights(tokens_G, CANDIDATES, seed + 1)
    limit_G = np.maximum(max_epochs * tokens_G / run_tokens, tokens_G / tokens_G.sum())
    allowed_NG = candidates_NG[(candidates_NG <= limit_G).all(1)]
    if not len(allowed_NG):
        allowed_NG = (tokens_G / tokens_G.sum())[None]
    order = np.argsort(fitted.predict(allowed_NG), kind="stable")[:AVERAGED]
    best_G: np.ndarray = allowed_NG[order].mean(0)
    return best_G
