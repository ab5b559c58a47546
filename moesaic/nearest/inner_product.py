"""FGD (Zhang et al.): the largest inner products by a graph, such as the likeliest words of an output matrix.

One number is added to each row so that all have the length of the longest: sqrt(M^2 - |x|^2); to a query, a zero. Then
|q - x|^2 = |q|^2 + M^2 - 2 <q, x>, so that the nearest in the plain distance is the largest in the inner product, and
edges chosen by distance serve a walk by inner product. It finds what it should where lengths are not too different and
queries point where rows do; where one row in a thousand is several times as long as the others, score all rows instead.
"""

from __future__ import annotations

import numpy as np

from moesaic.nearest.codes import Codes
from moesaic.nearest.graph import Graph, GraphOptions, Report, Searcher


def lengthened(rows_ND: np.ndarray) -> np.ndarray:
    """Rows of one more number and of equal length."""
    squares_N = np.einsum("nd,nd->n", rows_ND, rows_ND, dtype=np.float64)
    added_N = np.sqrt(np.maximum(squares_N.max(initial=0.0) - squares_N, 0.0))
    return np.concatenate([rows_ND, added_N[:, None]], axis=1, dtype=np.float32, casting="unsafe")


class InnerProducts:
    """The rows with the largest inner products with a query, nearly always; the products themselves are exact."""

    def __init__(
        self,
        rows_ND: np.ndarray,
        options: GraphOptions = GraphOptions(),  # noqa: B008  (frozen)
        bits: int = 8,
        threads: int | None = None,
        report: Report | None = None,
    ) -> None:
        self.rows_NE = lengthened(rows_ND)
        made_of = Codes.of(self.rows_NE, 8, options.seed, threads)
        self.graph = Graph.of(self.rows_NE, made_of, "inner_product", options, threads, report)
        codes = made_of if bits == 8 else Codes.of(self.rows_NE, bits, options.seed, threads)
        self.searcher = Searcher(self.graph, codes, self.rows_NE)

    def search(
        self, queries_QD: np.ndarray, k: int, pool: int = 64, ranked: int | None = None, threads: int | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        queries_QE = np.concatenate([queries_QD, np.zeros((len(queries_QD), 1))], axis=1, dtype=np.float32)
        return self.searcher.search(queries_QE, k, pool, ranked, threads=threads)
