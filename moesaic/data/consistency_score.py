"""Scores for the curriculum `consistency`: how well models predict each document of prepared data.

score_consistency(Shards("out/data"), ["out/run/checkpoints/step-00000200", "out/run/checkpoints/step-00000400"])
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

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
    every = np.arange(data.documents)
    found = [predicted(data, path, every, max_length=max_length, batch_tokens=batch_tokens)[0] for path in checkpoints]
    score = without_gaps(np.mean(found, axis=0))
    data.add_column(COLUMN, score)
    return score


def predicted(
    data: Shards, path: str | Path, documents: np.ndarray, *, max_length: int = 512, batch_tokens: int = 8192
) -> tuple[np.ndarray, np.ndarray]:
    """Of a model, for each of these documents: the mean probability of the right token, and how often it is the most
    probable; nan where there is nothing to predict."""
    model = moesaic.load(path)
    if model.config.vocab < data.vocabulary:
        problem = f"knows {model.config.vocab} tokens, and the data has {data.vocabulary}"
        raise UserError(path, problem, "Score with a model that was trained on this data.")
    lengths = np.minimum(data.lengths[documents], max_length)
    ends = np.cumsum(lengths)
    probable, right = np.full(len(documents), np.nan), np.full(len(documents), np.nan)
    first = 0
    while first < len(documents):
        # As many documents as fit into a batch, at least one.
        room = ends[first] - lengths[first] + batch_tokens
        last = max(first + 1, int(np.searchsorted(ends, room, side="right")))
        starts = data.starts[documents[first:last]]
        tokens = [
            data.gather(starts[n : n + 1], lengths[first + n : first + n + 1]).tolist() for n in range(len(starts))
        ]
        for number, logits_TV in enumerate(model.logits(tokens), first):
            if len(logits_TV) > 1:
                log_TV = logits_TV[:-1].log_softmax(-1)
                after_T = torch.tensor(tokens[number - first][1:], device=log_TV.device)
                probable[number] = float(log_TV.gather(1, after_T[:, None]).exp().mean())
                right[number] = float((log_TV.argmax(-1) == after_T).float().mean())
        first = last
    return probable, right


def without_gaps(score: np.ndarray) -> np.ndarray:
    """Gaps filled with the mean of the others."""
    known = score[~np.isnan(score)]
    return np.where(np.isnan(score), known.mean() if len(known) else 0.0, score)
