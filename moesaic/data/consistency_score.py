"""Scores for the curriculum `consistency`: how well the checkpoints of a run predict each document.

score_consistency(Shards("out/data"), ["out/run/step-200", "out/run/step-400"])
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

import moesaic
from moesaic.data.curricula.consistency import COLUMN
from moesaic.data.shards import Shards
from moesaic.errors import UserError


def score_consistency(
    data: Shards, checkpoints: Sequence[str | Path], *, max_length: int = 512, batch_tokens: int = 8192
) -> np.ndarray:
    """The mean probability of the right token over the first `max_length` tokens and all checkpoints; kept as a column.

    A document of one token, which predicts nothing, gets the mean of the others.
    """
    if not checkpoints:
        raise UserError("score_consistency", "no checkpoint to score with", "Give one or more model directories.")
    lengths = np.minimum(data.lengths, max_length)
    ends = np.cumsum(lengths)
    total = np.zeros(data.documents)
    for path in checkpoints:
        model = moesaic.load(path)
        if model.config.vocab < data.vocabulary:
            problem = f"knows {model.config.vocab} tokens, and the data has {data.vocabulary}"
            raise UserError(path, problem, "Score with a model that was trained on this data.")
        first = 0
        while first < data.documents:
            # As many documents as fit into a batch, at least one.
            room = ends[first] - lengths[first] + batch_tokens
            last = max(first + 1, int(np.searchsorted(ends, room, side="right")))
            tokens = [data.gather(data.starts[n : n + 1], lengths[n : n + 1]).tolist() for n in range(first, last)]
            for number, log in enumerate(model.logprobs(tokens), first):
                total[number] += float(log.exp().mean()) if len(log) else np.nan
            first = last
    score = total / len(checkpoints)
    score[np.isnan(score)] = np.nanmean(score) if not np.isnan(score).all() else 0.0
    data.add_column(COLUMN, score)
    return score
