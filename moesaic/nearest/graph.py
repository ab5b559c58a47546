"""MRNG / NSG (Fu et al.): a graph of vectors on which a greedy walk comes nearer to what it looks for at every step.

Of candidates near a vector, those become its neighbours that no nearer neighbour occludes: d(neighbour, candidate) <
d(vector, candidate). Degrees are bounded, and a tree from the navigating node makes every vector reachable. The graph
is made of codes of 8 bits; a search walks on codes and ranks the best by the full vectors, which stay in their file.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from moesaic import atomic, json_files
from moesaic.errors import UserError
from moesaic.nearest.codes import BLOCK, Codes, library, long, pointer
from moesaic.nearest.exact import Metric, address, checked, unit
from moesaic.nearest.groups import NOBODY, Groups, group, neighbour_lists

Report = Callable[[str, float], None]  # what is being done, and the part of the whole that is done


@dataclass(frozen=True)
class GraphOptions:
    degree: int = 32  # edges of a vector, at most
    candidates: int = 64  # near ones that edges are chosen from
    walk: int = 0  # pool of the walk to each vector; what it meets are candidates too; 0: none
    group: int = 400  # vectors for each k-means group
    overlap: int = 6  # groups that a vector is in
    entries: int = 256  # vectors that a search may begin at, at most
    seed: int = 0


class _Records(ctypes.Structure):
    _fields_ = [("at", ctypes.c_void_p), ("stride", ctypes.c_long), ("size", ctypes.c_long), ("bits", ctypes.c_int)]


class _Graph(ctypes.Structure):
    _fields_ = [
        ("records", _Records), ("links", ctypes.c_void_p), ("degree", ctypes.c_long), ("count", ctypes.c_long),
        ("entries", ctypes.c_void_p), ("entry_count", ctypes.c_long),
    ]  # fmt: skip


class _Full(ctypes.Structure):
    _fields_ = [
        ("rows", ctypes.c_void_p), ("file", ctypes.c_int), ("offset", ctypes.c_long), ("size", ctypes.c_long),
    ]  # fmt: skip


class _Index(ctypes.Structure):
    _fields_ = [
        ("graph", _Graph), ("full", _Full), ("middle", ctypes.c_void_p), ("signs", ctypes.c_void_p),
        ("block", ctypes.c_long), ("distance", ctypes.c_int), ("alive", ctypes.c_void_p),
    ]  # fmt: skip


@dataclass
class Graph:
    links_NR: np.ndarray  # of uint32, NOBODY behind a vector's last
    entries_G: np.ndarray  # of uint32: where a walk may begin; the first is the navigating node
    metric: Metric
    tree_X2: np.ndarray = field(default_factory=lambda: np.empty((0, 2), dtype=np.uint32))  # edges that connect it

    @classmethod
    def of(
        cls,
        rows_ND: np.ndarray,
        codes: Codes,
        metric: Metric = "inner_product",
        options: GraphOptions = GraphOptions(),  # noqa: B008  (frozen)
        threads: int | None = None,
        report: Report | None = None,
    ) -> Graph:
        """Inner products are searched as cosines are: for rows of different lengths, see `inner_product`."""
        threads, tell = threads or torch.get_num_threads(), report or (lambda what, part: None)
        count, native = len(rows_ND), library()
        if not count:
            raise UserError("graph", "there are no vectors to make it of")
        tell("groups", 0.0)
        groups = group(rows_ND, codes.middle_D, options.group, options.overlap, options.seed)
        entries_G = chosen_entries(codes, groups, options.entries)
        tell("neighbours", 0.1)
        lists_NK = neighbour_lists(codes, groups, min(options.candidates, max(1, count - 1)), threads)
        tell("edges", 0.6)
        links_NR = np.empty((count, options.degree), dtype=np.uint32)
        other_NR = np.empty_like(links_NR)
        degree = long(options.degree)
        native.nearest_select(
            *codes.place, long(count), pointer(lists_NK), long(lists_NK.shape[1]), pointer(links_NR), degree, threads
        )
        native.nearest_both_ways(
            *codes.place, long(count), pointer(links_NR), pointer(other_NR), degree, threads
        )  # fmt: skip
        links_NR, other_NR = other_NR, links_NR
        if options.walk:
            native.nearest_by_walking(
                *codes.place, long(count), pointer(links_NR), degree, pointer(entries_G), long(len(entries_G)),
                pointer(lists_NK), long(lists_NK.shape[1]), long(options.walk), long(8 * options.candidates),
                pointer(other_NR), long(0), long(count), threads,
            )  # fmt: skip
            native.nearest_both_ways(
                *codes.place, long(count), pointer(other_NR), pointer(links_NR), degree, threads
            )  # fmt: skip
        tell("connecting", 0.95)
        added_X2 = np.empty((count, 2), dtype=np.uint32)
        native.nearest_connect.restype = ctypes.c_long
        edges = native.nearest_connect(
            *codes.place, long(count), pointer(links_NR), degree, pointer(entries_G), long(64), pointer(added_X2)
        )
        entries_G = with_lost(codes, links_NR, entries_G, options.entries)
        tell("connecting", 1.0)
        return cls(links_NR, entries_G, metric, added_X2[:edges].copy())

    def save(self, folder: Path) -> None:
        np.save(folder / "links.npy", self.links_NR)
        np.savez(folder / "graph.npz", entries=self.entries_G, tree=self.tree_X2)
        atomic.write_text(folder / "graph.json", json.dumps({"metric": self.metric}) + "\n")

    @classmethod
    def load(cls, folder: Path) -> Graph:
        metric = json_files.read_json(folder / "graph.json")["metric"]
        with np.load(folder / "graph.npz") as arrays:
            entries_G, tree_X2 = arrays["entries"], arrays["tree"]
        return cls(np.load(folder / "links.npy", mmap_mode="r"), entries_G, metric, tree_X2)


def chosen_entries(codes: Codes, groups: Groups, most: int) -> np.ndarray:
    """The navigating node, which is nearest the middle of all, then others, one a group."""
    body = codes.padded
    lengths_N = np.ascontiguousarray(codes.records_NB[:, body + 4 : body + 8]).view(np.float32)[:, 0]
    first = np.uint32(lengths_N.argmin())  # the codes are centred
    spread = groups.entries_G[:: -(-len(groups.entries_G) // most)]
    return np.concatenate([[first], np.setdiff1d(spread, [first])]).astype(np.uint32)


def with_lost(codes: Codes, links_NR: np.ndarray, entries_G: np.ndarray, room: int) -> np.ndarray:
    """More entries, up to `room` more, where walks from those that there are do not arrive."""
    more_G = np.concatenate([entries_G, np.zeros(room, dtype=np.uint32)])
    find = library().nearest_find_lost
    find.restype = ctypes.c_long
    count, degree = links_NR.shape
    found = find(
        *codes.place, long(count), pointer(links_NR), long(degree), pointer(more_G), long(len(entries_G)),
        long(len(more_G)), long(max(1, min(16, count // 500))), long(64),
    )  # fmt: skip
    return more_G[:found].copy()


class Searcher:
    """A graph with codes to walk on and full vectors to rank by: in memory (or mapped), or read from an open file."""

    def __init__(
        self, graph: Graph, codes: Codes, rows_ND: np.ndarray | None = None, file: int = -1, offset: int = 0
    ) -> None:
        self.graph, self.codes, self.rows_ND = graph, codes, rows_ND
        if rows_ND is not None and (rows_ND.dtype != np.float32 or not rows_ND.flags.c_contiguous):
            raise UserError("vectors", "must lie side by side in float32 to be ranked by")
        records_NB = codes.records_NB
        self.index = _Index(
            _Graph(
                _Records(address(records_NB), records_NB.shape[1], codes.padded, codes.bits),
                address(graph.links_NR), graph.links_NR.shape[1], len(records_NB),
                address(graph.entries_G), len(graph.entries_G),
            ),
            _Full(None if rows_ND is None else address(rows_ND), file, offset, codes.given),
            address(codes.middle_D), address(codes.signs_3P), BLOCK, graph.metric == "l2", None,
        )  # fmt: skip
        self.native = library().nearest_search

    def search(
        self,
        queries_QD: np.ndarray,
        k: int,
        pool: int = 64,
        ranked: int | None = None,
        alive_N: np.ndarray | None = None,
        threads: int | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Rows and scores, best first; -1 behind the last, where a walk found fewer than k that are alive."""
        metric = self.graph.metric
        queries_QD = checked(np.empty((0, self.codes.given)), queries_QD, k, metric)
        if metric == "cosine":
            queries_QD = unit(queries_QD)
        pool = max(pool, k)
        count = len(queries_QD)
        ids_QK, scores_QK = np.empty((count, k), dtype=np.int64), np.empty((count, k), dtype=np.float32)
        self.index.alive = None if alive_N is None else address(alive_N)
        self.native(
            ctypes.byref(self.index), pointer(queries_QD), long(count), long(k), long(pool),
            long(pool if ranked is None else max(k, ranked)), pointer(ids_QK), pointer(scores_QK),
            threads or torch.get_num_threads(),
        )  # fmt: skip
        return ids_QK, scores_QK


__all__ = ["NOBODY", "Graph", "GraphOptions", "Searcher"]
