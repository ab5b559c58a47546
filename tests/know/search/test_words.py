"""BM25 over segments: the scores are those of one index of what is alive, and equal bm25s's on the same tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import bm25s
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moesaic.know.chunk import Chunk
from moesaic.know.search.bm25 import SATURATION, SHORTENING
from moesaic.know.search.tokens import document_terms, query_terms
from moesaic.know.search.words import Words, WordsPart
from moesaic.know.store.part import Segment

WORDS = "ant bee cat dog elk fox gnu hen ibex jay kite lion mole newt owl"
VOCABULARY = WORDS.split()


def chunk(text: str) -> Chunk:
    return Chunk("id", "document", "source", "", text, 0, len(text))


def random_texts(count: int, seed: int = 0) -> list[str]:
    random = np.random.default_rng(seed)
    weights = 1 / np.arange(1, len(VOCABULARY) + 1)
    lengths = random.integers(1, 40, count)
    return [" ".join(random.choice(VOCABULARY, length, p=weights / weights.sum())) for length in lengths]


def opened(folder: Path, segments: Sequence[Sequence[str]], alive: Sequence[Sequence[bool]]) -> Words:
    placed, first = [], 0
    for number, texts in enumerate(segments):
        (folder / f"{number}" / "words").mkdir(parents=True)
        WordsPart().write(folder / f"{number}" / "words", [chunk(text) for text in texts])
        placed.append(Segment(folder / f"{number}", first, np.array(alive[number], bool)))
        first += len(texts)
    return WordsPart().open(placed)


def dense(words: Words, query: str) -> np.ndarray:
    scores = np.zeros(words.rows, np.float32)
    rows, found = words.scores(query)
    scores[rows] = found
    return scores


def test_scores_equal_those_of_bm25s(tmp_path: Path) -> None:
    texts = random_texts(300)
    words = opened(tmp_path, [texts], [[True] * len(texts)])
    oracle = bm25s.BM25(method="lucene", k1=SATURATION, b=SHORTENING)
    oracle.index([document_terms(text) for text in texts], show_progress=False)
    for query in ("owl", "ant owl newt", "cat cat lion", "zebra jay", "ibex kite mole ant bee"):
        expected = oracle.get_scores([term for term in query_terms(query) if term in oracle.vocab_dict])
        np.testing.assert_allclose(dense(words, query), expected, rtol=1e-5, atol=1e-6)


@given(
    st.lists(st.lists(st.tuples(st.integers(0, 10**6), st.booleans()), min_size=1, max_size=6), min_size=1, max_size=4)
)
@settings(max_examples=25, deadline=None)
def test_segments_and_deleted_rows_score_as_one_index(
    tmp_path_factory: pytest.TempPathFactory, segments: list[list[tuple[int, bool]]]
) -> None:
    folder = tmp_path_factory.mktemp("words")
    texts = [[random_texts(1, seed)[0] for seed, _ in segment] for segment in segments]
    alive = [[kept for _, kept in segment] for segment in segments]
    words = opened(folder / "many", texts, alive)
    kept = [text for segment, living in zip(texts, alive) for text, lives in zip(segment, living) if lives]
    (folder / "merged").mkdir()
    WordsPart().merge(folder / "merged", words.segments)
    (folder / "whole").mkdir()
    WordsPart().write(folder / "whole", [chunk(text) for text in kept])
    for file in (folder / "whole").iterdir():
        if file.suffix == ".npy":
            np.testing.assert_array_equal(np.load(folder / "merged" / file.name), np.load(file))
        else:
            assert (folder / "merged" / file.name).read_bytes() == file.read_bytes()
    whole = opened(folder / "one", [kept], [[True] * len(kept)])
    living = np.concatenate(alive)
    for query in ("ant", "owl bee", "fox gnu hen"):
        scores = dense(words, query)
        np.testing.assert_allclose(scores[living], dense(whole, query), rtol=1e-5)
        assert not scores[~living].any()


def test_the_best_come_first_and_of_equals_the_earlier(tmp_path: Path) -> None:
    words = opened(tmp_path, [["cat dog", "dog elk", "cat"], ["dog elk", "fox"]], [[True] * 3, [True] * 2])
    rows, scores = words.search("elk", 5)
    assert rows.tolist() == [1, 3] and scores[0] == scores[1] > 0
    assert words.search("cat", 1)[0].tolist() == [2]  # the shorter
    assert words.search("zebra", 5)[0].tolist() == []
    assert words.search("", 5)[0].tolist() == []


def test_texts_without_words_are_no_trouble(tmp_path: Path) -> None:
    words = opened(tmp_path, [["!!!", "..."]], [[True, True]])
    assert words.search("anything", 3)[0].tolist() == []
    assert WordsPart().open([]).search("anything", 3)[0].tolist() == []


@pytest.mark.parametrize(
    ("text", "terms"),
    [
        ("Cats' bodies, the boss's buses", ["cat", "body", "the", "boss", "buse"]),
        ("don't STOP_me v2.0", ["don't", "stop_me", "v2", "0"]),
        ("Café CAFE\u0301 Straße", ["cafe", "cafe", "strasse"]),
        ("Ｆｕｌｌ ﬁsh", ["full", "fish"]),
        ("東京都 is big", ["東", "京", "都", "東京", "京都", "is", "big"]),
        ("हिन्दी", ["हिन्दी"]),
        ("x" * 100, ["x" * 64]),
    ],
)
def test_words_of_documents(text: str, terms: list[str]) -> None:
    assert document_terms(text) == terms


@pytest.mark.parametrize(
    ("query", "terms"),
    [
        ("What is the name of the cats?", ["name", "cat"]),
        ("to be or not to be", ["to", "be", "or", "not", "to", "be"]),
        ("東京都", ["東京", "京都"]),
        ("猫", ["猫"]),
        ("C is a language", ["c", "language"]),
    ],
)
def test_words_of_queries(query: str, terms: list[str]) -> None:
    assert query_terms(query) == terms


def test_every_language_finds_its_own(tmp_path: Path) -> None:
    texts = ["東京は日本の首都です。", "猫が好きです。", "Die Häuser sind groß.", "Les chats dorment.", "Дома́ стоят."]
    words = opened(tmp_path, [texts], [[True] * len(texts)])
    for query, row in [("日本", 0), ("猫", 1), ("haeuser häuser", 2), ("GROSS", 2), ("chat", 3), ("дома", 4)]:
        assert words.search(query, 1)[0].tolist() == [row]
