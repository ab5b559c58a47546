"""Search by the graph beside faiss's HNSW: recall@10 and latency, building, memory; one query at a time.

    python -m bench.nearest --vectors minilm.npy          100,000 x 384 embeddings of text (made once with --embed)
    python -m bench.nearest --embed texts.json --vectors minilm.npy     a JSON list of texts, by all-MiniLM-L6-v2
    python -m bench.nearest                               without vectors: clustered stand-ins, drawn
    python -m bench.nearest --count 5000 --ef 200 --no-record           a minute

The last rows of the file are the queries. Times are processor time, the best of several passes that take turns; wall
time stands beside them. Two threads take the queries of a batch between them.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import torch

from bench.measure import record
from moesaic.nearest import exact, zoom
from moesaic.nearest.codes import Codes
from moesaic.nearest.graph import Graph, GraphOptions, Searcher

K = 10
POOLS = (10, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384)
Search = Callable[[np.ndarray, int, int], np.ndarray]  # queries, pool, threads -> rows


def drawn(count: int, size: int) -> np.ndarray:
    """Points about centres, closer or wider, in fewer dimensions, with noise in all: shaped like embeddings."""
    random = np.random.default_rng(0)
    inner = 48
    centres_CI = random.normal(size=(max(8, count // 80), inner)).astype(np.float32)
    spread_C1 = random.lognormal(-0.4, 0.4, size=(len(centres_CI), 1)).astype(np.float32)
    which_N = random.integers(0, len(centres_CI), count)
    points_NI = centres_CI[which_N] + spread_C1[which_N] * random.normal(size=(count, inner)).astype(np.float32)
    rows_ND = points_NI @ random.normal(size=(inner, size)).astype(np.float32) / inner**0.5
    return exact.unit(rows_ND + 0.4 * random.normal(size=rows_ND.shape).astype(np.float32))


def embed(texts: Path, to: Path) -> None:
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer("sentence-transformers/all-MiniLM-L6-v2", device="cpu")
    np.save(to, model.encode(json.loads(texts.read_text()), batch_size=64, normalize_embeddings=True))


def timed(run: Callable[[], Any]) -> tuple[Any, float, float]:
    wall, processor = time.perf_counter(), time.process_time()
    made = run()
    return made, time.perf_counter() - wall, time.process_time() - processor


def hnsw(rows_ND: np.ndarray, construction: int, threads: int) -> Any:
    faiss.omp_set_num_threads(threads)
    index = faiss.IndexHNSWFlat(rows_ND.shape[1], 32, faiss.METRIC_INNER_PRODUCT)
    index.hnsw.efConstruction = construction
    index.add(rows_ND)
    return index


def by_faiss(index: Any) -> Search:
    def search(queries_QD: np.ndarray, pool: int, threads: int) -> np.ndarray:
        faiss.omp_set_num_threads(threads)
        index.hnsw.efSearch = pool
        rows_QK: np.ndarray = index.search(queries_QD, K)[1]
        return rows_QK

    return search


def curves(
    searches: dict[str, Search], queries_QD: np.ndarray, true_QK: np.ndarray, passes: int
) -> list[dict[str, Any]]:
    rows = []
    for pool in POOLS:
        best: dict[str, list[float]] = {name: [np.inf] * 4 for name in searches}
        recall: dict[str, float] = {}
        for _ in range(passes):
            for name, search in searches.items():
                single, wall, processor = timed(
                    lambda: np.concatenate([search(query_D[None], pool, 1) for query_D in queries_QD])
                )
                _, both, both_processor = timed(lambda: search(queries_QD, pool, 2))
                best[name] = [
                    min(a, b) for a, b in zip(best[name], (processor, wall, both, both_processor), strict=True)
                ]
                hits = sum(len(set(a) & set(b)) for a, b in zip(single.tolist(), true_QK.tolist(), strict=True))
                recall[name] = hits / true_QK.size
        for name, seconds in best.items():
            micro = [round(s / len(queries_QD) * 1e6, 1) for s in seconds]
            rows.append(
                {"index": name, "pool": pool, "recall": round(recall[name], 4), "processor_us": micro[0],
                 "wall_us": micro[1], "two_threads_wall_us": micro[2], "two_threads_processor_us": micro[3]}
            )  # fmt: skip
            print(f"{name:>10} pool {pool:3}: recall {recall[name]:.4f}, {micro[0]:6.0f} us processor, "
                  f"{micro[1]:6.0f} us wall; two threads {micro[2]:6.0f} us wall a query", flush=True)  # fmt: skip
    return rows


def at_recall(rows: list[dict[str, Any]], name: str, recall: float) -> float | None:
    """Processor time at a recall, straight between the two points about it."""
    points = sorted((row["recall"], row["processor_us"]) for row in rows if row["index"] == name)
    for (low, fast), (high, slow) in pairwise(points):
        if low <= recall <= high:
            return float(fast + (slow - fast) * (recall - low) / max(high - low, 1e-9))
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vectors", type=Path)
    parser.add_argument("--embed", type=Path)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--size", type=int, default=384)
    parser.add_argument("--queries", type=int, default=1000)
    parser.add_argument("--ef", type=int, nargs="+", default=[40, 200], help="faiss's efConstruction")
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--no-record", action="store_true")
    args = parser.parse_args()
    if args.embed:
        embed(args.embed, args.vectors)
    given = np.load(args.vectors, mmap_mode="r") if args.vectors else drawn(args.count + args.queries, args.size)
    queries_QD = np.array(given[-args.queries :], dtype=np.float32)
    rows_ND = np.array(given[: min(args.count, len(given) - args.queries)], dtype=np.float32)
    true_QK, _ = exact.search(rows_ND, queries_QD, K)
    threads = torch.get_num_threads()
    full = rows_ND.nbytes
    builds: list[dict[str, Any]] = []
    searches: dict[str, Search] = {}

    def built(name: str, seconds: tuple[Any, float, float], memory: int) -> Any:
        made, wall, processor = seconds
        builds.append({"index": name, "wall_s": round(wall, 1), "processor_s": round(processor, 1), "bytes": memory})
        print(f"{name:>10} built in {processor:.1f} s of processor, {wall:.1f} s wall with {threads} threads; "
              f"{memory / 2**20:.1f} MiB", flush=True)  # fmt: skip
        return made

    codes, graph = built(
        "graph",
        timed(lambda: (codes := Codes.of(rows_ND, 8), Graph.of(rows_ND, codes))),
        full + rows_ND.shape[0] * (rows_ND.shape[1] + 8 + 4 * GraphOptions().degree),
    )
    walking = Searcher(graph, codes, rows_ND)
    searches["graph"] = lambda queries, pool, threads: walking.search(queries, K, pool, 32, threads=threads)[0]
    with tempfile.TemporaryDirectory() as folder:
        np.save(Path(folder) / "rows.npy", rows_ND)
        graph.save(Path(folder))
        Codes.of(rows_ND, zoom.BITS).save(Path(folder))
        zoomed = zoom.Zoom(Path(folder) / "rows.npy", Path(folder))
        searches["zoom"] = lambda queries, pool, threads: zoomed.search(queries, K, pool, threads=threads)[0]
        for construction in args.ef:
            name = f"hnsw {construction}"
            index = built(name, timed(lambda: hnsw(rows_ND, construction, threads)), 0)
            builds[-1]["bytes"] = size = len(faiss.serialize_index(index))
            searches[name] = by_faiss(index)
            print(f"      zoom holds {zoomed.memory / 2**20:.1f} MiB, {zoomed.memory / size:.3f} of it", flush=True)
        builds.append({"index": "zoom", "bytes": zoomed.memory})
        rows = curves(searches, queries_QD, true_QK, args.passes)
    peers = [f"hnsw {construction}" for construction in args.ef]
    for recall in (0.9, 0.95, 0.98, 0.99, 0.995):
        times = {name: at_recall(rows, name, recall) for name in searches}
        told = ", ".join(f"{name} {'-' if us is None else f'{us:.0f} us'}" for name, us in times.items())
        print(f"recall {recall}: {told}")
    source = "embeddings of text" if args.vectors else "drawn"
    if not args.no_record:
        print(record("nearest", rows, builds=builds, vectors=list(rows_ND.shape), source=source, peers=peers))


if __name__ == "__main__":
    main()
