"""Exact nearest neighbours: every row is scored, block by block, so that rows may lie in a file of any size.

A score is the higher the better: the inner product, the cosine, or the negative squared distance. Rows that score alike
come in their own order. A row's score does not depend on which others are searched with it, nor on the blocks.
"""

from __future__ import annotations

import ctypes
from typing import Literal, get_args

import numpy as np
import torch

from moesaic.errors import UserError
from moesaic.kernels import native

Metric = Literal["inner_product", "cosine", "l2"]
BLOCK = 32 << 20  # bytes of rows that are scored at a time
SPARE = 16  # rows beyond k whose distances are computed again without cancellation


def search(
    rows_ND: np.ndarray,
    queries_QD: np.ndarray,
    k: int,
    metric: Metric = "inner_product",
    alive_N: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """The k best rows of each query and their scores, best first; fewer, for all queries, where fewer are alive."""
    queries_QD = checked(rows_ND, queries_QD, k, metric)
    wanted = min(k, len(rows_ND) if alive_N is None else int(np.count_nonzero(alive_N)))
    best = [Best(wanted + (SPARE if metric == "l2" else 0)) for _ in queries_QD]
    if metric == "cosine":
        queries_QD = unit(queries_QD)
    step = max(1, BLOCK // max(1, 4 * rows_ND.shape[1]))
    for first in range(0, len(rows_ND) if wanted else 0, step):
        block_BD = np.ascontiguousarray(rows_ND[first : first + step], dtype=np.float32)
        scores_QB = inner_products(queries_QD, block_BD)
        if metric == "cosine":
            scores_QB /= np.maximum(np.linalg.norm(block_BD, axis=1), 1e-30)
        elif metric == "l2":
            scores_QB -= 0.5 * np.einsum("bd,bd->b", block_BD, block_BD)
        alive_B = None if alive_N is None else alive_N[first : first + step]
        for keeper, scores_B in zip(best, scores_QB, strict=True):
            keeper.add(first, scores_B, alive_B)
    if metric == "l2":
        for keeper, query_D in zip(best, queries_QD, strict=True):
            keeper.score_again(-np.square(rows_ND[keeper.rows] - query_D).sum(axis=1), wanted)
    shape = (len(queries_QD), wanted)
    rows_QK = np.array([keeper.rows for keeper in best], dtype=np.int64).reshape(shape)
    return rows_QK, np.array([keeper.scores for keeper in best], dtype=np.float32).reshape(shape)


class Best:
    """The best rows so far, best first and among equals the lower number first."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.rows, self.scores = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.float32)

    def add(self, first: int, scores_B: np.ndarray, alive_B: np.ndarray | None) -> None:
        """Rows from `first` on; rows come in order, so a later one must be better than the last that is kept."""
        full = len(self.rows) == self.count
        kept_B = scores_B > self.scores[-1] if full else np.ones(len(scores_B), dtype=bool)
        chosen = np.flatnonzero(kept_B if alive_B is None else kept_B & alive_B)
        if len(chosen) > self.count:
            least = np.partition(scores_B[chosen], len(chosen) - self.count)[len(chosen) - self.count]
            chosen = chosen[scores_B[chosen] >= least]
        rows = np.concatenate([self.rows, chosen + first])
        scores = np.concatenate([self.scores, scores_B[chosen]])
        order = np.lexsort((rows, -scores))[: self.count]
        self.rows, self.scores = rows[order], scores[order]

    def score_again(self, scores: np.ndarray, count: int) -> None:
        order = np.lexsort((self.rows, -scores))[:count]
        self.rows, self.scores = self.rows[order], scores[order]


def inner_products(queries_QD: np.ndarray, rows_BD: np.ndarray) -> np.ndarray:
    """Native, where it can be had: each number is then the same alone as among others."""
    kernels = native.kernels()
    if kernels is None:
        product: np.ndarray = queries_QD @ rows_BD.T
        return product
    scores_QB = np.empty((len(queries_QD), len(rows_BD)), dtype=np.float32)
    kernels.library.linear(
        address(queries_QD), address(rows_BD), None, address(scores_QB),
        len(queries_QD), rows_BD.shape[1], len(rows_BD), queries_QD.shape[1], torch.get_num_threads(),
    )  # fmt: skip
    return scores_QB


def address(array: np.ndarray) -> int:
    return ctypes.c_void_p(array.ctypes.data).value or 0


def unit(rows_ND: np.ndarray) -> np.ndarray:
    """Rows of length one; a row of zeros stays."""
    divided: np.ndarray = rows_ND / np.maximum(np.linalg.norm(rows_ND, axis=-1, keepdims=True), 1e-30)
    return divided.astype(np.float32)


def checked(rows_ND: np.ndarray, queries_QD: np.ndarray, k: int, metric: str) -> np.ndarray:
    """The queries, side by side in float32, if the question makes sense."""
    if metric not in get_args(Metric):
        raise UserError("metric", f"unknown: '{metric}'", f"There are {', '.join(get_args(Metric))}.")
    if k < 1:
        raise UserError("k", f"must be at least 1, not {k}")
    if queries_QD.ndim != 2 or queries_QD.shape[1] != rows_ND.shape[1]:
        raise UserError(
            "query",
            f"has the shape {queries_QD.shape}, but the vectors that are searched have {rows_ND.shape[1]} dimensions",
            "Embed it with the model that made the vectors.",
        )
    queries_QD = np.ascontiguousarray(queries_QD, dtype=np.float32)
    if not np.isfinite(queries_QD).all():
        raise UserError("query", "has numbers that are not finite")
    return queries_QD
