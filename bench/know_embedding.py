"""An embedding model's matrices in 8 bits beside 32: processor time, how far vectors move, and what is found with them.

    python -m bench.know_embedding --model MINILM                        time and cosines, a minute
    python -m bench.know_embedding --model MINILM --data DIR [DIR ...]   retrieval too, as bench.know_retrieval reads it

    python -m bench.know_embedding --model MINILM --text FILE            time of another text

The text is this project's own documents, in the chunks that a knowledge base makes of them; both embed it in turns,
with one thread and with all cores, and the best run of each counts. A base embeds its passages in 8 bits and queries
in 32. Differences in recall are paired over questions (95 %, bootstrap). Vectors of samples are kept beside them
(`minilm-8.npz`, `minilm-32.npz`), since embedding takes most of the time.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.know_retrieval import Kept, interval, read, recalls, searches
from bench.measure import record
from moesaic.know.documents.chunking import chunks_of
from moesaic.know.documents.document import Raw
from moesaic.know.documents.formats import read_documents
from moesaic.know.embed import Embedder
from moesaic.know.search.vectors import passage

DOCS = Path(__file__).parent.parent / "docs"
METHODS = ("vectors", "fusion, normalised", "mutual")


def texts(files: list[Path], most: int) -> list[str]:
    """Passages from all documents, as many characters as asked."""
    documents = [doc for file in files for doc in read_documents(Raw(file.read_bytes(), str(file), []))]
    every = [passage(chunk) for document in documents for chunk in chunks_of(document)]
    step = max(1, sum(map(len, every)) // most)
    return every[::step]


def time_row(model: Path, files: list[Path], most: int, threads: int, rounds: int) -> dict[str, Any]:
    torch.set_num_threads(threads)
    some = texts(files, most)
    embedders = {bits: Embedder.open(model, device="cpu", threads=threads, bits=bits) for bits in (32, 8)}
    size = sum(len(text.encode()) for text in some) / 1e6
    processor, wall, vectors = {32: np.inf, 8: np.inf}, {32: np.inf, 8: np.inf}, {}
    for _ in range(rounds):
        for bits, embedder in embedders.items():
            begin, begun = time.process_time(), time.perf_counter()
            vectors[bits] = embedder.embed(some)
            processor[bits] = min(processor[bits], time.process_time() - begin)
            wall[bits] = min(wall[bits], time.perf_counter() - begun)
    cosines = (vectors[32] * vectors[8]).sum(axis=1)
    return {
        "what": "time", "text": files[0].stem if len(files) == 1 else "docs", "threads": threads,
        "megabytes": size, "chunks": len(some),
        "processor_seconds_per_megabyte": {str(bits): float(seconds / size) for bits, seconds in processor.items()},
        "wall_seconds_per_megabyte": {str(bits): float(seconds / size) for bits, seconds in wall.items()},
        "cosine": {"least": float(cosines.min()), "mean": float(cosines.mean())},
    }  # fmt: skip


def retrieval_rows(model: Path, folder: Path) -> list[dict[str, Any]]:
    sample, kept, found = read(folder), {}, {}
    for bits in (32, 8):
        kept[bits] = Kept(model, folder / f"minilm-{bits}.npz")
        kept[bits].embedder = Embedder.open(model, device="cpu", bits=bits)
    for queries, passages in ((32, 32), (32, 8), (8, 8)):
        kept[passages].queries = kept[queries]
        with tempfile.TemporaryDirectory() as place:
            methods = searches(sample, kept[passages], Path(place), {})
        found[queries, passages] = {name: recalls(sample, methods[name], 5) for name in METHODS}
    rows = []
    for (queries, passages), recall in found.items():
        for name, values in recall.items():
            more = values - found[32, 32][name]
            rows.append(
                {
                    "what": "recall@5", "sample": sample.name, "questions": len(more), "method": name,
                    "query bits": queries, "passage bits": passages, "recall@5": float(values.mean()),
                    "above 32": float(more.mean()), "above 32 interval": interval(more),
                }
            )  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="moesaic convert minilm DIR")
    parser.add_argument("--data", type=Path, nargs="*", default=[], help="folders of samples")
    parser.add_argument("--text", type=Path, help="in place of this project's documents, for the time")
    parser.add_argument("--characters", type=int, default=100_000, help="of the documents that are timed")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    files, cores = [options.text] if options.text else sorted(DOCS.rglob("*.md")), torch.get_num_threads()
    rows = [time_row(options.model, files, options.characters, threads, options.rounds) for threads in (1, cores)]
    for folder in options.data:
        rows += retrieval_rows(options.model, folder)
    for row in rows:
        print(row)
    print(record("know_embedding", rows))


if __name__ == "__main__":
    main()
