"""Zoom (Zhang and He): codes and a graph in memory choose candidates, full vectors on disk rank them in one batch.

Codes of 4 bits and the graph take less than a fifth of what full vectors and a graph like HNSW's take in memory. What
the system caches of the file it can give up at any time.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from moesaic.errors import UserError
from moesaic.nearest.codes import Codes
from moesaic.nearest.exact import Metric, unit
from moesaic.nearest.graph import Graph, GraphOptions, Report, Searcher

BITS = 4
RANKED = 64  # of a pool that are read from the file, or four times as many as are wanted


def build(
    vectors: Path,
    folder: Path,
    metric: Metric = "inner_product",
    options: GraphOptions = GraphOptions(),  # noqa: B008  (frozen)
    threads: int | None = None,
    report: Report | None = None,
) -> None:
    """Of the float32 rows in a .npy file, into a folder that exists: links.npy, codes4.npy and what is small."""
    rows_ND, _ = opened(vectors)
    if metric == "cosine":
        rows_ND = unit(rows_ND)
    # Edges are chosen by codes of 8 bits, which are not kept.
    graph = Graph.of(rows_ND, Codes.of(rows_ND, 8, options.seed, threads), metric, options, threads, report)
    Codes.of(rows_ND, BITS, options.seed, threads).save(folder)
    graph.save(folder)


class Zoom:
    def __init__(self, vectors: Path, folder: Path) -> None:
        rows_ND, offset = opened(vectors)
        graph, codes = Graph.load(folder), Codes.load(folder, BITS)
        if rows_ND.shape != (len(graph.links_NR), codes.given):
            raise UserError(vectors, f"the graph in {folder} was made of other vectors", "Build it again.")
        self.metric: Metric = graph.metric
        self.file = os.open(vectors, os.O_RDONLY | os.O_CLOEXEC)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.file, 0, 0, os.POSIX_FADV_RANDOM)
        # In memory for good: a walk must never wait for a disk.
        self.graph = Graph(np.array(graph.links_NR), graph.entries_G, graph.metric, graph.tree_X2)
        self.codes = Codes(np.array(codes.records_NB), BITS, codes.middle_D, codes.signs_3P, codes.given)
        self.searcher = Searcher(self.graph, self.codes, file=self.file, offset=offset)

    @property
    def memory(self) -> int:
        """Bytes that are held."""
        arrays = (self.graph.links_NR, self.graph.entries_G, self.graph.tree_X2, self.codes.records_NB)
        return sum(array.nbytes for array in (*arrays, self.codes.middle_D, self.codes.signs_3P))

    def search(
        self,
        queries_QD: np.ndarray,
        k: int,
        pool: int = 64,
        alive_N: np.ndarray | None = None,
        threads: int | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Rows and scores by the full vectors, best first; -1 behind the last where fewer than k were found."""
        return self.searcher.search(queries_QD, k, pool, max(RANKED, 4 * k), alive_N, threads)

    def close(self) -> None:
        if self.file >= 0:
            os.close(self.file)
            self.file = -1

    def __del__(self) -> None:
        if getattr(self, "file", -1) >= 0:
            self.close()


def opened(vectors: Path) -> tuple[np.ndarray, int]:
    """The rows of a .npy file, mapped, and where in it they begin."""
    try:
        rows_ND = np.load(vectors, mmap_mode="r")
    except (OSError, ValueError) as error:
        raise UserError(vectors, f"is no .npy file of vectors: {error}") from error
    if rows_ND.ndim != 2 or rows_ND.dtype != np.float32 or not rows_ND.flags.c_contiguous:
        raise UserError(vectors, f"must hold float32 rows, not {rows_ND.dtype} of the shape {rows_ND.shape}")
    return rows_ND, int(rows_ND.offset)
