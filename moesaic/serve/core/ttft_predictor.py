"""How long a forward will take, learned from those that have run: the time-to-first-token predictor of FlowPrefill.

A forward of n new tokens, each behind its sequence's earlier ones, takes

    seconds = a + b n + c n (cached + n / 2)

a for reading the weights, b for the matmuls of a token, c for the pairs of tokens in attention. The three are fitted by
recursive least squares: relative errors, so that a short forward counts as much as a long one, and the past decays, so
that the fit follows a machine that gets busier. None is negative, which also keeps extrapolations sensible.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import numpy as np

DECAY = 0.95  # of what a forward counts for, with the next one
SUBSETS = [list(kept) for count in (3, 2, 1) for kept in itertools.combinations(range(3), count)]


class TTFTPredictor:
    def __init__(self) -> None:
        self.squares = np.zeros((3, 3))  # the normal equations of least squares
        self.products = np.zeros(3)
        self.terms = np.zeros(3)  # a, b, c

    def seconds(self, spans: Iterable[tuple[int, int]]) -> float:
        """Of one forward over sequences with so many new and so many cached tokens; 0 before anything was observed."""
        return float(self.terms @ _features(spans))

    def observe(self, spans: Iterable[tuple[int, int]], seconds: float) -> None:
        if seconds <= 0.0:
            return
        x = _features(spans) / seconds
        self.squares = DECAY * self.squares + np.outer(x, x)
        self.products = DECAY * self.products + x
        self.terms = self._fit()

    def _fit(self) -> np.ndarray:
        """The best of the solutions in which some terms are zero and the others are not negative."""
        scale = np.sqrt(np.diag(self.squares))
        scale[scale == 0.0] = 1.0
        squares, products = self.squares / np.outer(scale, scale), self.products / scale
        best, least = np.zeros(3), 0.0
        for kept in SUBSETS:
            # Few and similar forwards do not tell the terms apart; the smallest solution then shares between them.
            found = np.linalg.lstsq(squares[np.ix_(kept, kept)], products[kept], rcond=1e-9)[0]
            terms = np.zeros(3)
            terms[kept] = found
            error = terms @ squares @ terms - 2.0 * products @ terms
            if (found >= 0.0).all() and error < least - 1e-12:
                best, least = terms, error
        return best / scale


def _features(spans: Iterable[tuple[int, int]]) -> np.ndarray:
    tokens = pairs = 0.0
    for new, cached in spans:
        tokens += new
        pairs += new * (cached + new / 2)
    return np.array([1.0, tokens, pairs])
