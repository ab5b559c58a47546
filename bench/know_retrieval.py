"""Recall of what multi-hop questions need: words (BM25), vectors (MiniLM), their fusion, and the mutual index.

    python -m bench.know_retrieval --data DIR [DIR ...] --model MINILM       # one DIR per sample
    python -m bench.know_retrieval --worlds 3 --model MINILM                 # generated worlds, without files

A DIR holds questions (`qa*.json`, in the published form of HotpotQA, 2WikiMultiHopQA or MuSiQue) and their corpus
(`*corpus.json`); the chunks are its passages. Differences are paired over questions, with 95 % bootstrap intervals.
Vectors are kept beside the data (`minilm.npz`), since embedding takes most of the time.

The constants of the mutual index were chosen on the training samples of HotpotQA and MuSiQue (100 questions each) and
on nothing else; figures in docs/results.md are of the development sets' samples, which share no question with them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.measure import record
from moesaic.data.tasks.multihop import world
from moesaic.know.chunk import Chunk
from moesaic.know.embed import Embedder
from moesaic.know.graph.part import GraphPart
from moesaic.know.search.fusion import Ranked, normalised, reciprocal_rank
from moesaic.know.search.mutual import Mutual
from moesaic.know.search.vectors import VectorPart
from moesaic.know.search.words import WordsPart
from moesaic.know.store.part import Segment

DEPTH = 100


@dataclass(frozen=True)
class Asked:
    text: str
    gold: frozenset[int]  # passages that hold its facts
    hops: str


@dataclass(frozen=True)
class Sample:
    name: str
    passages: list[tuple[str, str]]
    questions: list[Asked]


def read(folder: Path) -> Sample:
    corpus = json.loads(_file(folder, "*corpus.json").read_text())
    asked = json.loads(_file(folder, "qa*.json").read_text())
    if isinstance(corpus, dict):
        passages = [(title, "".join(sentences)) for title, sentences in corpus.items()]
    else:
        passages = [(passage["title"], passage["text"]) for passage in corpus]
    whole = {passage: row for row, passage in enumerate(passages)}
    by_title = {title: row for row, (title, _) in reversed(list(enumerate(passages)))}
    questions = []
    for one in asked:
        if "paragraphs" in one:  # MuSiQue
            support = [p for p in one["paragraphs"] if p["is_supporting"]]
            gold = frozenset(whole[p["title"], p["paragraph_text"]] for p in support)
            hops = one["id"].split("__")[0][:4]
        else:  # HotpotQA and 2WikiMultiHopQA
            gold = frozenset(by_title[title] for title, _ in one["supporting_facts"])
            hops = one.get("type") or f"{len(gold)}hop"
        questions.append(Asked(one["question"], gold, hops))
    return Sample(folder.name, passages, questions)


def _file(folder: Path, pattern: str) -> Path:
    """The largest: some repositories keep empty ones beside it."""
    return max(folder.glob(pattern), key=lambda file: file.stat().st_size)


def generated(seeds: Sequence[int]) -> Sample:
    """Worlds side by side, so that there is something to confuse."""
    passages: list[tuple[str, str]] = []
    questions: list[Asked] = []
    for seed in seeds:
        made = world(seed, split="train", people=40, phrasings=4, distractors=20)
        rows = {title: len(passages) + row for row, (title, _) in enumerate(made.documents)}
        passages += made.documents
        questions += [
            Asked(q.text, frozenset(rows[title] for title in q.supporting), f"{q.hops}hop")
            for q in made.questions
            if q.supporting
        ]
    return Sample("generated", passages, questions)


class Kept:
    """An embedder that remembers, in a file, what it embedded."""

    def __init__(self, model: Path | None, file: Path | None) -> None:
        self.model, self.file = model, file
        self.embedder: Embedder | None = None
        self.queries = self  # what embeds the questions
        self.known: dict[bytes, np.ndarray] = {}
        self.name, self.dimensions = "minilm", 384
        if file is not None and file.exists():
            with np.load(file) as stored:
                self.known = {key.tobytes(): v for key, v in zip(stored["keys"], stored["vectors"], strict=True)}

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        keys = [hashlib.sha256(text.encode()).digest()[:16] for text in texts]
        new = {key: text for key, text in zip(keys, texts, strict=True) if key not in self.known}
        if new:
            if self.model is None:
                raise SystemExit(f"{len(new)} texts have no vectors yet: name --model DIR (moesaic convert minilm DIR)")
            self.embedder = self.embedder or Embedder.open(self.model)
            self.known |= dict(zip(new, self.embedder.embed(list(new.values())), strict=True))
            if self.file is not None:
                stored = np.array([np.frombuffer(key, np.uint8) for key in self.known])
                np.savez(self.file, keys=stored, vectors=np.stack(list(self.known.values())))
        return np.stack([self.known[key] for key in keys])


def chunks_of(passages: Sequence[tuple[str, str]]) -> list[Chunk]:
    return [Chunk(str(n), str(n), title, title, text, 0, len(text)) for n, (title, text) in enumerate(passages)]


Search = Callable[[int], np.ndarray]


def searches(sample: Sample, embedder: Kept, folder: Path, facts: dict[str, Any]) -> dict[str, Search]:
    """Each method, as a question's number to its rows, the best first."""
    chunks = chunks_of(sample.passages)
    size = sum(len(text.encode()) for _, text in sample.passages) / 1e6
    parts: list[Any] = [WordsPart(), GraphPart(), VectorPart(embedder)]
    for part in parts:
        (folder / part.name).mkdir()
        begin = time.process_time()
        part.write(folder / part.name, chunks)
        facts[f"{part.name}_cpu_s_per_mb"] = (time.process_time() - begin) / size
    segment = Segment(folder, 0, np.ones(len(chunks), bool))
    words, graph, vectors = (part.open([segment]) for part in parts)
    mutual = Mutual(graph)
    asked_QD = embedder.queries.embed([question.text for question in sample.questions])
    by_words = [words.search(question.text, DEPTH) for question in sample.questions]
    by_vectors = [vectors.search(vector_D, DEPTH) for vector_D in asked_QD]
    both = [normalised(pair) for pair in zip(by_words, by_vectors, strict=True)]
    mutual.transition  # noqa: B018  built before it is timed
    begin = time.process_time()
    found = [mutual.search(q.text, ranked, DEPTH) for q, ranked in zip(sample.questions, both, strict=True)]
    facts["mutual_cpu_ms"] = 1e3 * (time.process_time() - begin) / max(1, len(found))
    facts |= {"passages": len(chunks), "mb": size, "entities": len(graph.entities), "triples": len(graph.said)}

    def of(ranked: Sequence[Ranked]) -> Search:
        return lambda number: ranked[number][0]

    return {
        "words": of(by_words),
        "vectors": of(by_vectors),
        "fusion, reciprocal rank": of([reciprocal_rank(pair) for pair in zip(by_words, by_vectors, strict=True)]),
        "fusion, normalised": of(both),
        "mutual, words only": of(
            [mutual.search(q.text, normalised([w]), DEPTH) for q, w in zip(sample.questions, by_words)]
        ),
        "mutual": of(found),
    }


def recalls(sample: Sample, search: Search, k: int) -> np.ndarray:
    return np.array([len(q.gold & set(search(n)[:k].tolist())) / len(q.gold) for n, q in enumerate(sample.questions)])


def reciprocal_ranks(sample: Sample, search: Search) -> np.ndarray:
    """Of the first passage that is needed."""
    first = [
        next((rank for rank, row in enumerate(search(number).tolist(), 1) if row in question.gold), np.inf)
        for number, question in enumerate(sample.questions)
    ]
    return 1 / np.array(first)


def interval(values: np.ndarray, rounds: int = 10_000) -> tuple[float, float]:
    """Of the mean, 95 %, by bootstrap."""
    random = np.random.default_rng(0)
    means = values[random.integers(0, len(values), (rounds, len(values)))].mean(axis=1)
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)


def measured(sample: Sample, embedder: Kept) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    facts: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        methods = searches(sample, embedder, Path(folder), facts)
        best = recalls(sample, methods["mutual"], 5)
        rows = []
        for name, search in methods.items():
            at_5 = recalls(sample, search, 5)
            row: dict[str, Any] = {"sample": sample.name, "questions": len(at_5), "method": name}
            row |= {
                "recall@2": recalls(sample, search, 2).mean(),
                "recall@5": at_5.mean(),
                "mrr": reciprocal_ranks(sample, search).mean(),
            }
            row["recall@5 interval"] = interval(at_5)
            row["mutual above"] = (best - at_5).mean()
            row["mutual above interval"] = interval(best - at_5)
            groups = sorted({q.hops for q in sample.questions})
            row["by hops"] = {
                g: float(np.mean([r for r, q in zip(at_5, sample.questions) if q.hops == g])) for g in groups
            }
            rows.append(row)
    return rows, facts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, nargs="*", default=[], help="folders of samples")
    parser.add_argument("--worlds", type=int, default=0, help="generated worlds, side by side")
    parser.add_argument("--model", type=Path, help="an embedding model's directory: moesaic convert minilm DIR")
    parser.add_argument("--record", action="store_true", help="keep the figures in bench/results")
    options = parser.parse_args()
    samples = [(read(folder), folder / "minilm.npz") for folder in options.data]
    everything: list[dict[str, Any]] = []
    facts: dict[str, Any] = {}
    for sample, file in [*samples, *([(generated(range(options.worlds)), None)] if options.worlds else [])]:
        rows, facts[sample.name] = measured(sample, Kept(options.model, file))
        everything += rows
        print(f"\n{sample.name}: {len(sample.questions)} questions, {len(sample.passages)} passages")
        print(", ".join(f"{name} {value:.3g}" for name, value in facts[sample.name].items()))
        for row in rows:
            low, high = row["recall@5 interval"]
            less, more = row["mutual above interval"]
            print(
                f"  {row['method']:24} recall@5 {row['recall@5']:.3f} [{low:.3f}, {high:.3f}]  "
                f"@2 {row['recall@2']:.3f}  MRR {row['mrr']:.3f}  "
                f"mutual above by {row['mutual above']:+.3f} [{less:+.3f}, {more:+.3f}]  "
                + " ".join(f"{group} {value:.3f}" for group, value in row["by hops"].items())
            )
    if options.record:
        print(record("know_retrieval", everything, facts=facts))


if __name__ == "__main__":
    main()
