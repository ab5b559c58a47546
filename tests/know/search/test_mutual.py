"""The mutual index: a passage that a question does not name is found through the one it does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from moesaic.data.tasks.multihop import world
from moesaic.know.chunk import Chunk
from moesaic.know.graph.part import GraphPart
from moesaic.know.search.fusion import normalised
from moesaic.know.search.mutual import Mutual, Walk
from moesaic.know.search.words import Words, WordsPart
from moesaic.know.store.part import Segment

TEXTS = [
    ("Green (album)", "Green is an album by Steve Hillage."),
    ("Steve Hillage", "Steve Hillage is an English musician. Hillage is married to Miquette Giraudy."),
    ("Miquette Giraudy", "Miquette Giraudy was born in Nice."),
    ("Spouse", "A spouse is a partner in a marriage. The spouse of a performer may perform."),
    ("Green", "Green is a colour. Performers like green."),
    ("Oslo", "Oslo is the capital of Norway."),
]


def opened(folder: Path, texts: list[tuple[str, str]]) -> tuple[Mutual, Words, Segment]:
    chunks = [Chunk(str(n), str(n), title, title, text, 0, len(text)) for n, (title, text) in enumerate(texts)]
    segment = Segment(folder, 0, np.ones(len(texts), bool))
    for part in (WordsPart(), GraphPart()):
        (folder / part.name).mkdir()
        part.write(folder / part.name, chunks)
    return Mutual(GraphPart().open([segment])), WordsPart().open([segment]), segment


def test_a_second_hop_is_reached(tmp_path: Path) -> None:
    mutual, words, _ = opened(tmp_path, TEXTS)
    query = "Who is the spouse of the performer of the album Green?"
    found = normalised([words.search(query, 100)])
    rows, scores = mutual.search(query, found, 4)
    assert {0, 1} <= set(rows.tolist())
    assert 1 not in words.search(query, 100)[0]  # which shares no word with the question
    assert (np.diff(scores) <= 0).all()


def test_a_search_gives_the_same_twice_and_no_dead_rows(tmp_path: Path) -> None:
    mutual, words, segment = opened(tmp_path, TEXTS)
    query = "Who made the album Green?"
    found = normalised([words.search(query, 100)])
    one, two = mutual.search(query, found, 6), mutual.search(query, found, 6)
    assert one[0].tolist() == two[0].tolist() and one[1].tolist() == two[1].tolist()
    segment.alive[1] = False
    without = Mutual(GraphPart().open([segment]))
    found = normalised([WordsPart().open([segment]).search(query, 100)])
    assert 1 in one[0] and 1 not in without.search(query, found, 6)[0]


def test_without_names_or_hits(tmp_path: Path) -> None:
    mutual, _, _ = opened(tmp_path, TEXTS)
    nothing = (np.zeros(0, np.int64), np.zeros(0))
    assert mutual.search("how?", nothing, 5)[0].tolist() == []
    assert mutual.search("What of Norway?", nothing, 1)[0].tolist() == [5]
    assert Mutual(GraphPart().open([])).search("What of Norway?", nothing, 5)[0].tolist() == []


def test_walks_keep_what_they_start_with(tmp_path: Path) -> None:
    """What is at all nodes together stays one, since every node of this graph leads on."""
    mutual, words, _ = opened(tmp_path, TEXTS)
    out = np.asarray(mutual.transition.sum(axis=0)).ravel()
    assert out == pytest.approx(1.0, abs=1e-5)
    still = Mutual(mutual.graph, Walk(on=0.0, entities=0.0))
    found = normalised([words.search("album Green", 100)])
    assert set(np.flatnonzero(still.visits("album Green", found))) == set(found[0].tolist())


def test_above_words_on_generated_worlds(tmp_path: Path) -> None:
    made = world(1, split="test", people=20, phrasings=2, distractors=10)
    mutual, words, _ = opened(tmp_path, list(made.documents))
    row = {title: number for number, (title, _) in enumerate(made.documents)}
    recall = {"words": 0.0, "mutual": 0.0}
    asked = [question for question in made.questions if question.hops > 1 and question.supporting]
    for question in asked:
        gold = {row[title] for title in question.supporting}
        ranked = words.search(question.text, 100)
        recall["words"] += len(gold & set(ranked[0][:5].tolist())) / len(gold)
        best = mutual.search(question.text, normalised([ranked]), 5)[0]
        recall["mutual"] += len(gold & set(best.tolist())) / len(gold)
    assert len(asked) > 10
    assert recall["mutual"] > recall["words"] + 0.05 * len(asked)
