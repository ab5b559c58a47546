"""Nearly exact search without a graph: all rows by their codes, a fraction of the memory traffic, then the best few
by their full vectors.

It needs no building and does not depend on how rows and queries are spread. For the output matrix of a language model
it finds the likeliest word more surely than a graph does (docs/LOG.md).
"""

from __future__ import annotations

import ctypes

import numpy as np
import torch

from moesaic.nearest.codes import Codes, library, long, pointer
from moesaic.nearest.exact import Metric, address, checked, unit
from moesaic.nearest.graph import Graph, Searcher


class Scan:
    def __init__(self, rows_ND: np.ndarray, metric: Metric = "inner_product", bits: int = 4, seed: int = 0) -> None:
        """Rows in float32, side by side; for cosines, of length one."""
        self.codes = Codes.of(rows_ND, bits, seed)
        without = np.empty((len(rows_ND), 0), dtype=np.uint32)
        self.searcher = Searcher(Graph(without, np.empty(0, dtype=np.uint32), metric), self.codes, rows_ND)

    def search(
        self,
        queries_QD: np.ndarray,
        k: int,
        pool: int = 64,
        alive_N: np.ndarray | None = None,
        threads: int | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Rows and scores, best first; `pool` rows are ranked by their full vectors. -1 where there are not k."""
        index, metric = self.searcher.index, self.searcher.graph.metric
        queries_QD = checked(np.empty((0, self.codes.given)), queries_QD, k, metric)
        if metric == "cosine":
            queries_QD = unit(queries_QD)
        shape = (len(queries_QD), k)
        ids_QK, scores_QK = np.empty(shape, dtype=np.int64), np.empty(shape, dtype=np.float32)
        index.alive = None if alive_N is None else address(alive_N)
        library().nearest_scan(
            ctypes.byref(index), pointer(queries_QD), long(len(queries_QD)), long(k), long(max(pool, k)),
            pointer(ids_QK), pointer(scores_QK), threads or torch.get_num_threads(),
        )  # fmt: skip
        return ids_QK, scores_QK
