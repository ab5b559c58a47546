"""Train the graph neural scorer of the mutual index, and measure it beside personalised PageRank on held-out samples.

    python -m bench.know_scorer --train DIR DIR --data DIR DIR DIR [--keep]

Folders are those of bench/know_retrieval.py, with their vectors (`minilm.npz`). Each question is learned from twice,
with and without vectors, so that one scorer serves both kinds of base. Epochs are chosen by two-fold cross-validation
on the training questions; `--keep` writes the weights of the first seed into the package.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.know_retrieval import DEPTH, Kept, Sample, chunks_of, interval, read
from bench.measure import record
from moesaic.know.graph.part import GraphPart
from moesaic.know.search.mutual import Mutual
from moesaic.know.search.neural import FEATURES, WEIGHTS, Candidates, Neural
from moesaic.know.search.vectors import VectorPart
from moesaic.know.search.words import WordsPart
from moesaic.know.store.part import Segment

HIDDEN = 16
EPOCHS = (5, 10)
Asked = tuple[Candidates, np.ndarray, int]  # with which are needed, and how many are


def asked(sample: Sample, embedder: Kept, with_vectors: Sequence[bool]) -> list[Asked]:
    chunks = chunks_of(sample.passages)
    parts: list[Any] = [WordsPart(), GraphPart(), VectorPart(embedder)]
    with tempfile.TemporaryDirectory() as folder:
        segment = Segment(Path(folder), 0, np.ones(len(chunks), bool))
        for part in parts:
            (segment.folder / part.name).mkdir()
            part.write(segment.folder / part.name, chunks)
        words, graph, vectors = (part.open([segment]) for part in parts)
        neural = Neural(Mutual(graph))
        found: list[Asked] = []
        for question in sample.questions:
            lists = [words.search(question.text, DEPTH), vectors.search(embedder.embed([question.text])[0], DEPTH)]
            for both in with_vectors:
                one = neural.candidates(question.text, lists if both else lists[:1])
                found.append((one, np.isin(one.rows_C, list(question.gold)), len(question.gold)))
    return found


def trained(questions: Sequence[Asked], epochs: int, seed: int) -> dict[str, np.ndarray]:
    torch.manual_seed(seed)
    shapes = {"first.own": (HIDDEN, FEATURES), "first.beside": (HIDDEN, FEATURES), "first.bias": (HIDDEN,)}
    shapes |= {"second.own": (HIDDEN, HIDDEN), "second.beside": (HIDDEN, HIDDEN), "second.bias": (HIDDEN,)}
    weights = {
        name: (torch.randn(shape) * (0.6 / shape[-1] ** 0.5) if len(shape) > 1 else torch.zeros(shape)).requires_grad_()
        for name, shape in shapes.items()
    } | {"out": torch.zeros(HIDDEN, requires_grad=True)}
    optimizer = torch.optim.AdamW(weights.values(), lr=3e-3, weight_decay=1e-2)
    falling = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.02, total_iters=epochs * len(questions))
    order = np.random.default_rng(seed)
    for _ in range(epochs):
        for number in order.permutation(len(questions)):
            found, needed, _ = questions[number]
            if not needed.any():
                continue
            h_CD, near_CC = torch.from_numpy(found.x_CF), torch.from_numpy(found.neighbours_CC)
            for layer in ("first", "second"):
                own, beside = h_CD @ weights[f"{layer}.own"].T, near_CC @ h_CD @ weights[f"{layer}.beside"].T
                h_CD = torch.relu(own + beside + weights[f"{layer}.bias"])
            logs_C = torch.log_softmax(h_CD @ weights["out"] + torch.from_numpy(found.score_C), 0)
            loss = -logs_C[torch.from_numpy(needed)].mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            falling.step()
    return {name: weight.detach().numpy() for name, weight in weights.items()}


def recalls(questions: Sequence[Asked], weights: dict[str, np.ndarray] | None, k: int = 5) -> np.ndarray:
    """Of the scorer, or of PageRank."""
    found = []
    scorer = Neural(None, weights)  # type: ignore[arg-type]  # scores need no graph
    for one, needed, count in questions:
        score_C = one.score_C if weights is None else scorer.scores(one)
        found.append(needed[np.argsort(-score_C, kind="stable")[:k]].sum() / count)
    return np.array(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=Path, nargs="+", required=True)
    parser.add_argument("--data", type=Path, nargs="+", required=True)
    parser.add_argument("--model", type=Path, help="an embedding model, for texts without vectors")
    parser.add_argument("--keep", action="store_true", help="write the weights into the package")
    options = parser.parse_args()
    torch.set_num_threads(1)
    questions = [
        one
        for folder in options.train
        for one in asked(read(folder), Kept(options.model, folder / "minilm.npz"), [True, False])
    ]
    pairs = [questions[number : number + 2] for number in range(0, len(questions), 2)]  # a question's two stay together
    folds = [[one for pair in pairs[side::2] for one in pair] for side in (0, 1)]
    checked = {e: np.mean([recalls(folds[s], trained(folds[1 - s], e, 0)).mean() for s in (0, 1)]) for e in EPOCHS}
    epochs = max(checked, key=lambda e: float(checked[e]))
    print(f"cross-validated: {checked}; PageRank {recalls(questions, None).mean():.4f}; {epochs} epochs", flush=True)
    seeds = [trained(questions, epochs, seed) for seed in range(3)]
    if options.keep:
        rounded = {name: np.round(weight, 5).tolist() for name, weight in seeds[0].items()}
        WEIGHTS.write_text(json.dumps(rounded) + "\n")
    rows = []
    for folder in options.data:
        sample, embedder = read(folder), Kept(options.model, folder / "minilm.npz")
        for both in (True, False):
            held_out = asked(sample, embedder, [both])
            by_seed = [recalls(held_out, weights) for weights in seeds]
            base = recalls(held_out, None)
            row = {"sample": sample.name, "questions": len(held_out), "vectors": both, "pagerank": base.mean()}
            row |= {"neural": [one.mean() for one in by_seed], "first seed above": (by_seed[0] - base).mean()}
            row |= {"interval": interval(by_seed[0] - base), "recall@2": recalls(held_out, seeds[0], 2).mean()}
            rows.append(row)
            print(row, flush=True)
    print(record("know_scorer", rows, epochs=epochs))


if __name__ == "__main__":
    main()
