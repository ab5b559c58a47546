"""Topics beside tomotopy: tokens a second and likelihood over iterations, one core each.

    python -m bench.topics                          about two minutes for each corpus; needs pip install tomotopy
    python -m bench.topics --topics 1000 --iterations 10 --corpora planted
    python -m bench.topics --text wiki=wiki.txt --text sums=sums.jsonl:question

Two corpora: documents drawn from planted topics, and text (functions of Python's standard library, and what --text
names, whose documents are paragraphs or records). Both programs get the same documents of the same words, the same
alpha and beta, which stay as they are, and one thread. The likelihood is that of words and topics together for each
word, worked out here from the topics that each program has given to the tokens. The peer's iteration is collapsed
Gibbs sampling; ours (`steps: 0`) looks at counts of words that are a few blocks older. An iteration then does a little
less, so what counts is processor time to the same likelihood. Also held-out: topics are kept, half of each
new document is folded in, the other half is predicted. Writes bench/results/topics.json
(with --topics another name).
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from bench.measure import machine, record
from moesaic.data.preparation.prepare import prepare
from moesaic.data.preparation.shard_writer import ShardWriter
from moesaic.data.shards import FORMAT, MANIFEST, Shards
from moesaic.data.topics.corpus import Words, blocks, choose_words
from moesaic.data.topics.sampler import Sampler, documents_likelihood, words_likelihood
from moesaic.recipe import load_recipe

ALPHA, BETA, PLANTED = 0.1, 0.01, 100
AT = (1, 2, 5, 10, 20, 40)  # iterations after which the likelihood is worked out
OURS = (1, 2, 3, 5, 7, 10, 13, 20, 25, 40, 50, 60)
HELD_OUT = 0.1


def planted(folder: Path, documents: int = 2000, length: int = 300, vocabulary: int = 8192) -> Shards:
    """Documents of PLANTED planted topics, as LDA says they come about."""
    if (folder / MANIFEST).exists():
        return Shards(folder)
    chance = np.random.default_rng(0)
    sums_KV = np.cumsum(chance.dirichlet(np.full(vocabulary, 0.05), PLANTED), 1)
    writer = ShardWriter(folder, vocabulary, [], 1 << 26)
    for _ in range(documents):
        topics = chance.choice(PLANTED, length, p=chance.dirichlet(np.full(PLANTED, ALPHA)))
        drawn = chance.random(length)
        tokens = np.empty(length, np.int64)
        for topic in np.unique(topics):
            mine = topics == topic
            tokens[mine] = np.searchsorted(sums_KV[topic], drawn[mine])
        writer.append(tokens.clip(1, vocabulary - 1), 0, False, {})
    write_manifest(folder, writer, vocabulary, documents, documents * length)
    return Shards(folder)


def write_manifest(folder: Path, writer: ShardWriter, vocabulary: int, documents: int, tokens: int) -> None:
    manifest = {
        "format": FORMAT, "vocabulary": vocabulary, "columns": [], "documents": documents, "tokens": tokens,
        "sources": [{"name": "planted"}], "shards": writer.finish(), "end_of_document": 0,
    }  # fmt: skip
    (folder / MANIFEST).write_text(json.dumps(manifest))


def text(folder: Path, given: list[str]) -> Shards:
    sources: list[dict[str, Any]] = [
        {"name": "code", "path": "builtin:stdlib", "separator": "\n\n\n", "documents": 2500}
    ]
    for entry in given:
        name, _, place = entry.partition("=")
        path, _, field = place.partition(":")
        sources.append(
            {"name": name, "path": path} | {"documents": 2500} | ({"text": field} if field else {"separator": "\n \n"})
        )
    recipe = {"model": {"vocab": 8192}, "data": {"sources": sources, "quality": None, "tokenizer_sample": 2_000_000}}
    (folder.parent / "text.yaml").write_text(yaml.safe_dump(recipe))
    prepare(load_recipe(folder.parent / "text.yaml"), folder)
    return Shards(folder)


def tokens_of(data: Shards, words: Words) -> tuple[np.ndarray, np.ndarray]:
    """The words of all documents, and whose each is; of documents with ten words or more."""
    found = [(block.number + piece_T, word_T) for block in blocks(data) for word_T, piece_T in [words.of(block)]]
    document_T, word_T = (np.concatenate([pair[n] for pair in found]) for n in (0, 1))
    enough_T = np.bincount(document_T)[document_T] >= 10
    return np.unique(document_T[enough_T], return_inverse=True)[1], word_T[enough_T]


def joint(document_T: np.ndarray, topic_T: np.ndarray, counts_WK: np.ndarray) -> float:
    documents = documents_likelihood(document_T, topic_T, counts_WK.shape[1], ALPHA)
    return (documents + words_likelihood(counts_WK, BETA)) / len(topic_T)


def held_out(counts_WK: np.ndarray, document_T: np.ndarray, word_T: np.ndarray) -> float:
    """log p of each second word of documents, whose topics are fitted to the others by 30 steps of EM."""
    phi_WK = (counts_WK + BETA) / (counts_WK.sum(0) + len(counts_WK) * BETA)
    seen_T = np.arange(len(word_T)) % 2 == 0
    size, (d_T, w_T) = int(document_T.max()) + 1, (document_T[seen_T], word_T[seen_T])
    theta_DK = np.full((size, counts_WK.shape[1]), 1 / counts_WK.shape[1])
    order = np.flatnonzero(np.diff(d_T, prepend=-1))
    for _ in range(30):
        parts_TK = theta_DK[d_T] * phi_WK[w_T]
        parts_TK /= parts_TK.sum(1, keepdims=True)
        theta_DK[d_T[order]] = np.add.reduceat(parts_TK, order) + ALPHA
        theta_DK /= theta_DK.sum(1, keepdims=True)
    return float(np.log((theta_DK[document_T[~seen_T]] * phi_WK[word_T[~seen_T]]).sum(1)).mean())


def curve(
    step: Callable[[int], None], measure: Callable[[], float], at: tuple[int, ...], size: int
) -> list[dict[str, float]]:
    """`step(n)` takes n iterations; seconds are the processor's."""
    rows, done, seconds = [], 0, 0.0
    for iteration in at:
        begun = time.process_time()
        step(iteration - done)
        seconds += time.process_time() - begun
        done = iteration
        rows.append({"iteration": iteration, "seconds": seconds, "likelihood": measure()})
        print({**rows[-1], "tokens_s": f"{size * done / seconds:,.0f}"}, flush=True)
    return rows


def ours(
    folder: Path, train: tuple[np.ndarray, np.ndarray], words: int, topics: int, at: tuple[int, ...]
) -> tuple[list[dict[str, float]], np.ndarray]:
    """From shards that hold these words and nothing else."""
    shutil.rmtree(folder, ignore_errors=True)
    document_T, word_T = train
    writer = ShardWriter(folder / "data", words + 1, [], 1 << 26)
    ends = np.flatnonzero(np.diff(document_T, append=-1)) + 1
    for mine in np.split(word_T, ends[:-1]):
        writer.append(mine, 0, False, {})
    write_manifest(folder / "data", writer, words + 1, len(ends), len(word_T))
    every = Words(np.append(np.arange(words, dtype=np.int32), np.int32(-1)), np.arange(words))
    sampler = Sampler(
        Shards(folder / "data"), every, folder / "topics", topics=topics, alpha=ALPHA, beta=BETA, threads=1
    )

    def step(count: int) -> None:
        for _ in range(count):
            sampler.iterate()

    def measure() -> float:
        return joint(document_T, sampler.topics_of(sampler.iteration), sampler.counts_WK)

    return curve(step, measure, at, len(word_T)), sampler.counts_WK


def peer(
    train: tuple[np.ndarray, np.ndarray], words: int, topics: int, at: tuple[int, ...]
) -> tuple[list[dict[str, float]], np.ndarray]:
    import tomotopy

    document_T, word_T = train
    model = tomotopy.LDAModel(k=topics, alpha=ALPHA, eta=BETA, seed=0)
    model.optim_interval = 0
    for mine in np.split(word_T, np.flatnonzero(np.diff(document_T)) + 1):
        model.add_doc([str(word) for word in mine])
    model.train(0, workers=1)
    names = np.array([int(name) for name in model.used_vocabs])

    def state() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        lengths = [len(document.topics) for document in model.docs]
        topic_T = np.concatenate([np.asarray(document.topics) for document in model.docs])
        counts_WK = np.zeros((words, topics), np.int32)
        np.add.at(counts_WK, (names[np.concatenate([document.words for document in model.docs])], topic_T), 1)
        return np.repeat(np.arange(len(lengths)), lengths), topic_T, counts_WK

    rows = curve(lambda count: model.train(count, workers=1), lambda: joint(*state()), at, len(word_T))
    return rows, state()[2]


def until(rows: list[dict[str, float]], likelihood: float) -> float | None:
    """Seconds to this likelihood, on a line between the two measurements around it."""
    for before, row in pairwise(rows):
        if before["likelihood"] < likelihood <= row["likelihood"]:
            way = (likelihood - before["likelihood"]) / (row["likelihood"] - before["likelihood"])
            return before["seconds"] + way * (row["seconds"] - before["seconds"])
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", action="append", default=[], help="NAME=FILE, or NAME=FILE.jsonl:FIELD")
    parser.add_argument("--out", type=Path, default=Path("out/topics"))
    parser.add_argument("--corpora", nargs="+", default=["planted", "text"])
    parser.add_argument("--topics", type=int, default=100)
    parser.add_argument("--iterations", type=int, default=40, help="of the peer; half as many more of ours")
    given = parser.parse_args()
    at, ours_at = (
        tuple(n for n in some if n <= most) for some, most in ((AT, given.iterations), (OURS, given.iterations * 1.5))
    )
    given.out.mkdir(parents=True, exist_ok=True)
    rows = []
    for name in given.corpora:
        data = planted(given.out / name) if name == "planted" else text(given.out / name, given.text)
        words = choose_words(data, 0.25, 3)
        document_T, word_T = tokens_of(data, words)
        tested_T = np.random.default_rng(1).random(int(document_T.max()) + 1)[document_T] < HELD_OUT
        train, test = (
            (np.unique(document_T[part], return_inverse=True)[1], word_T[part]) for part in (~tested_T, tested_T)
        )
        size = len(train[1])
        print(f"{name}: {size:,} words in {train[0].max() + 1:,} documents, {words.count:,} different", flush=True)
        mine, mine_WK = ours(given.out / f"{name}-ours", train, words.count, given.topics, ours_at)
        theirs, theirs_WK = peer(train, words.count, given.topics, at)
        row: dict[str, Any] = {
            "corpus": name,
            "words": size,
            "documents": int(train[0].max()) + 1,
            "vocabulary": words.count,
        }
        for who, found, counts_WK in (("moesaic", mine, mine_WK), ("tomotopy", theirs, theirs_WK)):
            speed = size * found[-1]["iteration"] / found[-1]["seconds"]
            row[who] = {"tokens_s": speed, "curve": found, "held_out": held_out(counts_WK, *test)}
            print(who, f"{speed:,.0f} tokens/s an iteration, held-out {row[who]['held_out']:.4f}")
        row["seconds_to_peers_likelihood"] = {
            str(at["iteration"]): [until(mine, at["likelihood"]), at["seconds"]] for at in theirs
        }
        print(row["seconds_to_peers_likelihood"])
        rows.append(row)
    name = "topics" if given.topics == 100 else f"topics_{given.topics}"
    record(name, rows, topics=given.topics, alpha=ALPHA, beta=BETA, threads=1, time="processor seconds")
    print(machine())


if __name__ == "__main__":
    main()
