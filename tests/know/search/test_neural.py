"""The graph neural scorer: its arithmetic, and that its weights do what they were trained for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from moesaic.data.tasks.multihop import world
from moesaic.know.search.neural import FEATURES, Candidates, Neural
from tests.know.search.test_mutual import TEXTS, opened


def weights(hidden: int = 4) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    shapes = {"first.own": (hidden, FEATURES), "first.beside": (hidden, FEATURES), "first.bias": (hidden,)}
    shapes |= {"second.own": (hidden, hidden), "second.beside": (hidden, hidden), "second.bias": (hidden,)}
    return {name: random.normal(size=shape).astype(np.float32) for name, shape in (shapes | {"out": (hidden,)}).items()}


def test_two_layers_reach_two_steps_away(tmp_path: Path) -> None:
    """In a chain of chunks, what changes at one end is felt two chunks away, and not three."""
    mutual, _, _ = opened(tmp_path, TEXTS)
    scorer = Neural(mutual, weights())
    chain = np.eye(4, k=1, dtype=np.float32)
    x = np.random.default_rng(1).random((4, FEATURES)).astype(np.float32)
    before = scorer.scores(Candidates(np.arange(4), x, chain, np.zeros(4, np.float32)))
    changed = x.copy()
    changed[3] += 5
    after = scorer.scores(Candidates(np.arange(4), changed, chain, np.zeros(4, np.float32)))
    assert after[0] == pytest.approx(before[0]) and after[1] != pytest.approx(before[1])


def test_without_weights_it_is_the_mutual_index(tmp_path: Path) -> None:
    mutual, words, _ = opened(tmp_path, TEXTS)
    query = "Who is the spouse of the performer of the album Green?"
    nothing = {name: np.zeros_like(weight) for name, weight in weights().items()}
    found = words.search(query, 100)
    from_scorer = Neural(mutual, nothing).search(query, [found], 4)[0]
    one = Neural(mutual, nothing).candidates(query, [found])
    assert from_scorer.tolist() == one.rows_C[np.argsort(-one.score_C, kind="stable")[:4]].tolist()
    empty = (np.zeros(0, np.int64), np.zeros(0))
    assert Neural(mutual, nothing).search("how?", [empty], 4)[0].tolist() == []


def test_the_trained_weights_find_what_worlds_ask_for(tmp_path: Path) -> None:
    made = world(2, split="test", people=20, phrasings=2, distractors=10)
    mutual, words, _ = opened(tmp_path, list(made.documents))
    row = {title: number for number, (title, _) in enumerate(made.documents)}
    neural = Neural(mutual)
    recall = {"words": 0.0, "neural": 0.0}
    asked = [question for question in made.questions if question.hops > 1 and question.supporting]
    for question in asked:
        gold = {row[title] for title in question.supporting}
        ranked = words.search(question.text, 100)
        recall["words"] += len(gold & set(ranked[0][:5].tolist())) / len(gold)
        recall["neural"] += len(gold & set(neural.search(question.text, [ranked], 5)[0].tolist())) / len(gold)
    assert len(asked) > 10
    assert recall["neural"] > recall["words"]  # on texts unlike those it was trained on
