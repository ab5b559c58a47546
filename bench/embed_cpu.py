"""Texts to vectors on a CPU, beside sentence-transformers, with the real all-MiniLM-L6-v2 in float32.

    python -m bench.embed_cpu             about three minutes; writes bench/results/embed_cpu.json
    python -m bench.embed_cpu --threads 2 --tokens 4096 --rounds 3

Rows are texts of one length (real words, cut to so many tokens) and a realistic mix: the paragraphs of this project's
documents as they come. Both sides get the same texts, tokenize them, and return vectors of length one; the peer runs
with the batch size that serves it best (`--peer-batches`). Runs alternate, and the best of each counts: processor time
stands beside wall time, since other programs may hold the cores. Vectors are compared in the same run.
"""

from __future__ import annotations

import argparse
import logging
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import sentence_transformers
import torch

from bench.measure import machine, record
from moesaic.know.embed import Embedder
from moesaic.model.minilm import find_minilm

LENGTHS = (16, 32, 64, 128, 256)
DOCS = Path(__file__).parent.parent / "docs"


def paragraphs() -> list[str]:
    texts = [part.strip() for file in sorted(DOCS.rglob("*.md")) for part in file.read_text().split("\n\n")]
    return [text for text in texts if text]


def of_length(embedder: Embedder, length: int, count: int) -> list[str]:
    """Texts of so many tokens, the two special ones included."""
    assert embedder.model.tokenizer is not None
    text = " ".join(paragraphs())
    ids = embedder.model.tokenizer.encode(text, special=False)
    words = [embedder.model.tokenizer.decode(ids[at : at + length - 2]) for at in range(0, len(ids), length - 2)]
    fitting = [one for one in words if len(embedder.model.tokenizer.encode(one)) == length]
    return [fitting[number % len(fitting)] for number in range(count)]


def timed(run: Callable[[], Any]) -> tuple[float, float]:
    wall, processor = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - wall, time.process_time() - processor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=8192, help="of each row")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peer-batches", type=int, nargs="+", default=[8, 32, 128])
    parser.add_argument("--no-record", action="store_true")
    arguments = parser.parse_args()
    logging.getLogger("sentence_transformers").setLevel(logging.ERROR)
    place = find_minilm()
    embedder = Embedder.open(place, device="cpu", threads=arguments.threads)
    peer = sentence_transformers.SentenceTransformer(str(place), device="cpu")
    torch.set_num_threads(arguments.threads)
    mixed = paragraphs()
    random.Random(0).shuffle(mixed)
    cases = {f"{length} tokens": of_length(embedder, length, arguments.tokens // length) for length in LENGTHS}
    lengths = [len(found.ids) for found in embedder.encoding.texts(mixed)]
    cases["mix"] = mixed[: next(n for n in range(len(mixed)) if sum(lengths[:n]) >= arguments.tokens)]
    rows: list[dict[str, Any]] = []
    for name, texts in cases.items():
        tokens = sum(len(found.ids) for found in embedder.encoding.texts(texts))

        def theirs(size: int, texts: list[str] = texts) -> np.ndarray:
            return peer.encode(texts, batch_size=size, normalize_embeddings=True, show_progress_bar=False)

        apart = float(np.abs(theirs(32) - embedder.embed(texts)).max())
        times: dict[Any, list[tuple[float, float]]] = {
            size: [timed(lambda: theirs(size))] for size in arguments.peer_batches
        }
        best = min(times, key=lambda size: min(times[size])[0])
        own = []
        for _ in range(arguments.rounds):
            times[best].append(timed(lambda: theirs(best)))
            own.append(timed(lambda: embedder.embed(texts)))
        wall, processor = (min(run[kind] for run in own) for kind in (0, 1))
        their_wall, their_processor = (min(run[kind] for run in times[best]) for kind in (0, 1))
        rows.append(
            {
                "texts": name,
                "count": len(texts),
                "tokens": tokens,
                "tokens_per_second": tokens / wall,
                "peer_tokens_per_second": tokens / their_wall,
                "ratio": their_wall / wall,
                "processor_ratio": their_processor / processor,
                "peer_batch": best,
                "largest_difference": apart,
            }
        )
        print(
            f"{name:>10}: {len(texts):4} texts, {tokens} tokens: sentence-transformers {tokens / their_wall:,.0f} "
            f"tokens/s (batch {best}), ours {tokens / wall:,.0f}: {their_wall / wall:.2f}x wall, "
            f"{their_processor / processor:.2f}x processor time; vectors within {apart:.1e}",
            flush=True,
        )
    if not arguments.no_record:
        print(record("embed_cpu", rows, sentence_transformers=sentence_transformers.__version__))
    else:
        print(machine())


if __name__ == "__main__":
    main()
