"""Consistency scores of prepared documents ("Characterizing Structural Regularities of Labeled Data"), and their proxy.

    found = score_documents(load_recipe("recipes/tiny.yaml"), Path("out/consistency"), models=4, steps=60)
    print(found.text())

The score of a document is its expected accuracy when it is held out: the share of its tokens that models predict which
were trained on random halves of the data without it. Models come in pairs whose halves are complements, so that each
document is held out from as many. The proxy is cheap: the mean probability of its tokens over the checkpoints of one
run on everything, as `data.scores` computes it too. Both become columns, and how far they agree is told, beside how
far two halves of the models do, which no proxy can be expected to exceed by much.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from scipy.stats import spearmanr

from moesaic.data.consistency_score import predicted, without_gaps
from moesaic.data.curricula.consistency import COLUMN
from moesaic.data.mixture import make_plan
from moesaic.data.preparation.prepare import Status
from moesaic.data.stream import TokenStream
from moesaic.errors import UserError
from moesaic.recipe import Recipe
from moesaic.train.checkpoints import Checkpoints
from moesaic.train.law.loss_law import write_json
from moesaic.train.proxies import Proxies

PROXY = f"{COLUMN}_proxy"
RESULT = "consistency.json"
MOMENTS = 4  # of a run, at which the proxy looks
RESAMPLED = 1000


@dataclass(frozen=True)
class Agreement:
    """A rank correlation, and the interval that 95 % of bootstrap samples of the documents lie in."""

    rank: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.rank:.3f} (95 %: {self.low:.3f} to {self.high:.3f})"


@dataclass(frozen=True)
class Consistency:
    documents: int
    models: int
    accuracy: float  # mean of the scores
    proxy: Agreement  # of the scores with the proxy
    halves: Agreement  # of the scores of one half of the pairs of models with those of the other

    def text(self) -> str:
        return (
            f"{self.documents:,} documents, each held out from {self.models // 2} of {self.models} models:"
            f" mean accuracy {self.accuracy:.1%}\nrank correlation with the proxy: {self.proxy}\n"
            f"of two halves of the models with each other: {self.halves}"
        )


def agreement(one: np.ndarray, other: np.ndarray, seed: int = 0) -> Agreement:
    known = ~(np.isnan(one) | np.isnan(other))
    one, other = one[known], other[known]
    chance = np.random.default_rng(seed)
    ranks = []
    for _ in range(RESAMPLED):
        drawn = chance.integers(len(one), size=len(one))
        ranks.append(_rank(one[drawn], other[drawn]))
    low, high = np.nanquantile(ranks, [0.025, 0.975])
    return Agreement(_rank(one, other), float(low), float(high))


def _rank(one: np.ndarray, other: np.ndarray) -> float:
    return float(spearmanr(one, other).statistic) if np.ptp(one) > 0 and np.ptp(other) > 0 else float("nan")


def score_documents(
    recipe: Recipe,
    out: Path,
    *,
    models: int = 4,
    steps: int = 60,
    max_length: int = 512,
    on_status: Callable[[Status], None] = lambda status: None,
    log: Callable[[str], None] = lambda text: None,
) -> Consistency:
    """Train the models, score all documents, and keep the columns `consistency` and `consistency_proxy`."""
    if models < 4 or models % 2:
        raise UserError("--models", f"{models} are not two pairs or more", "Train 4, 6, 8, ...")
    if steps < MOMENTS:
        raise UserError("--steps", f"the proxy looks at {MOMENTS} moments of a run of {steps} steps", "Train for more.")
    small = Proxies(recipe, out, steps=steps, on=None, tokens=8192, on_status=on_status, log=log)
    data, seed = small.data, small.recipe.train.seed
    small.total = steps * (models + 1)
    trained = np.flatnonzero(~data.held_out)
    right_MD = np.full((models, data.documents), np.nan)
    for pair in range(models // 2):
        half = np.random.default_rng([seed, pair]).permutation(trained)
        halves = np.array_split(half, 2)
        for number, (seen, unseen) in enumerate((halves, halves[::-1])):
            model = 2 * pair + number
            run = small.trained(_stream(small, np.sort(seen)), f"subset {model}", seed + model)
            away = np.sort(np.concatenate([unseen, np.flatnonzero(data.held_out)]))
            right_MD[model, away] = predicted(data, run, away, max_length=max_length)[1]
    every = steps // MOMENTS
    run = small.trained(_stream(small, trained), "all", seed, save_every=every, keep_every=every)
    kept = Checkpoints(run, 1, every)
    checkpoints = [kept.path(every * (at + 1)) for at in range(MOMENTS - 1)]
    documents = np.arange(data.documents)
    proxy = [predicted(data, path, documents, max_length=max_length)[0] for path in [*checkpoints, run]]
    score_D, proxy_D = _mean(right_MD), np.mean(proxy, axis=0)
    data.add_column(COLUMN, without_gaps(score_D))
    data.add_column(PROXY, without_gaps(proxy_D))
    pairs = right_MD.reshape(-1, 2, data.documents)
    found = Consistency(
        documents=data.documents,
        models=models,
        accuracy=float(np.nanmean(score_D)),
        proxy=agreement(score_D, proxy_D),
        halves=agreement(_mean(pairs[::2].reshape(-1, data.documents)), _mean(pairs[1::2].reshape(-1, data.documents))),
    )
    write_json(out / RESULT, asdict(found))
    return found


def _mean(scores_MD: np.ndarray) -> np.ndarray:
    """Over those models that have a score."""
    counts_D = (~np.isnan(scores_MD)).sum(0)
    return np.where(counts_D > 0, np.nansum(scores_MD, axis=0) / np.maximum(counts_D, 1), np.nan)


def _stream(small: Proxies, documents: np.ndarray) -> TokenStream:
    train, length = small.recipe.train, small.section.sequence_length
    plan = make_plan(small.data, small.section, tokens=small.steps * train.batch_tokens, documents=documents)
    return TokenStream(small.data, plan, batch_tokens=train.batch_tokens, sequence_length=length)
