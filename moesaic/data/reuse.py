"""What repeated data is worth ("Larger Datasets Can Be Repeated More": the effective reuse rate).

E(K, N) is how many times larger a data set of N tokens would have to be for one pass over it to do what K passes over
N do. The paper proves, for linear regression, E close to K for few epochs and a plateau that grows like log N. Between
these ends this file takes the curve that Muennighoff et al. (2023) fitted to language models,

    E(K, N) = 1 + R (1 - exp(-(K - 1) / R)),    R = 15.4 ln N / ln 1e10    (E = K for K at most 1)

with their constant of 15.4 repetitions put at 10 billion tokens, the middle of the sizes they trained on. It is a
heuristic: good for a warning that a mixture repeats too often, not for a prediction.
"""

from __future__ import annotations

import math

PLATEAU = 15.4
AT_TOKENS = 1e10
WORTH = 0.5  # an epoch that adds less than half of what fresh data would add is one too many


def plateau(tokens: int) -> float:
    """R: how many epochs' worth repetition can add at most."""
    return PLATEAU * math.log(max(tokens, 2)) / math.log(AT_TOKENS)


def effective_epochs(epochs: float, tokens: int) -> float:
    """E(K, N)."""
    if epochs <= 1:
        return epochs
    limit = plateau(tokens)
    return 1 + limit * -math.expm1(-(epochs - 1) / limit)


def marginal_worth(epochs: float, tokens: int) -> float:
    """What the last repetition adds, against as much fresh data: the slope of E in K."""
    return 1.0 if epochs <= 1 else math.exp(-(epochs - 1) / plateau(tokens))


def max_useful_epochs(tokens: int) -> float:
    """Epochs after which another one is worth less than half of fresh data."""
    return 1 + plateau(tokens) * math.log(1 / WORTH)
