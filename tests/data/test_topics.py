"""Topics of prepared documents: planted ones are found, with the same bits however it is done."""

from __future__ import annotations

import json
import tracemalloc
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from moesaic.cli import main
from moesaic.data.divided import divided
from moesaic.data.preparation.shard_writer import ShardWriter
from moesaic.data.shards import FORMAT, MANIFEST, Shards
from moesaic.data.stream import TokenStream
from moesaic.data.tokenizer_training import save_tokenizer, train_tokenizer
from moesaic.data.topics.corpus import Words, blocks, choose_words
from moesaic.data.topics.draws import keys
from moesaic.data.topics.find import FOLDER, find_topics
from moesaic.data.topics.saberlda import SaberSweep
from moesaic.data.topics.sampler import Sampler
from moesaic.data.topics.warplda import UNIT, alias_table
from moesaic.errors import UserError
from moesaic.kernels.native import topics as native
from moesaic.recipe_sections import TopicsSection
from moesaic.train.validate import check_columns
from tests.data.made import make_recipe

VOCABULARY, TOPICS = 300, 4


def planted(directory: Path, documents: int = 200, length: int = 60, shard_tokens: int = 5000) -> Shards:
    """Documents of one topic each, by turns: four of five tokens are of its own words, the others of words of all."""
    chance = np.random.default_rng(0)
    writer = ShardWriter(directory, VOCABULARY, [], shard_tokens)
    for number in range(documents):
        own = 100 + 50 * (number % TOPICS) + chance.integers(50, size=length)
        tokens = np.where(chance.random(length) < 0.8, own, 1 + chance.integers(99, size=length))
        writer.append(tokens, number % 2, number % 10 == 9, {})
    manifest = {
        "format": FORMAT, "vocabulary": VOCABULARY, "columns": [], "documents": documents, "end_of_document": 0,
        "tokens": documents * length, "sources": [{"name": "a"}, {"name": "b"}], "shards": writer.finish(),
    }  # fmt: skip
    (directory / MANIFEST).write_text(json.dumps(manifest))
    (directory / "tokenizer").mkdir()
    save_tokenizer(train_tokenizer(iter(["some words, and more of them\n" * 20]), VOCABULARY), directory / "tokenizer")
    return Shards(directory)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Shards:
    return planted(tmp_path_factory.mktemp("topics") / "data")


def purity(found_D: np.ndarray, planted_D: np.ndarray) -> float:
    """The share of documents that are of the planted topic most documents of their found topic are of."""
    pairs = np.zeros((found_D.max() + 1, TOPICS))
    np.add.at(pairs, (found_D, planted_D), 1)
    return float(pairs.max(1).sum() / pairs.sum())


def sampler(data: Shards, folder: Path, **options: object) -> Sampler:
    made = {"topics": 2 * TOPICS, "threads": 1, **options}
    return Sampler(data, choose_words(data, 0.9, 3), folder, **made)  # type: ignore[arg-type]


@pytest.mark.parametrize("steps", [0, 1])
def test_planted_topics_are_found(data: Shards, steps: int) -> None:
    section = TopicsSection(topics=2 * TOPICS, iterations=60, common=0.9, steps=steps)
    found = find_topics(data, section)
    topic_D = data.column("topic").astype(int)
    assert purity(topic_D, np.arange(data.documents) % TOPICS) > 0.95  # a third by chance
    assert data.column("topic_share").min() > 0.3
    assert sum(topic.documents for topic in found.topics) == data.documents
    assert found == find_topics(data, section)
    assert not (data.directory / FOLDER / "work").exists()


@pytest.mark.parametrize(("steps", "count"), [(0, 40), (2, 8)])
def test_the_bits_do_not_depend_on_compiler_or_threads(data: Shards, tmp_path: Path, steps: int, count: int) -> None:
    variants: list[dict[str, object]] = [{}, {"threads": 3}, {"compiled": False}]
    made: dict[str, object] = {"steps": steps, "topics": count, "block": 2000}
    runs = [sampler(data, tmp_path / str(n), **(made | options)) for n, options in enumerate(variants)]
    first = np.array(runs[0].topics_of(0))
    for _ in range(4):
        for run in runs:
            run.iterate()
    topics = [np.array(run.topics_of(4)) for run in runs]
    assert all(np.array_equal(topics[0], other) for other in topics[1:])
    assert (topics[0] != first).mean() > 0.3
    assert not np.array_equal(topics[0], np.array(sampler(data, tmp_path / "other", seed=1).topics_of(0)))


def test_a_topic_is_drawn_from_its_conditional_given_what_its_document_has_just_been_given() -> None:
    chance, documents, alpha, beta = np.random.default_rng(0), 20_000, 0.3, 0.1
    counts_WK = chance.integers(1, 9, (3, 20)).astype(np.int32)
    words, before = np.array([0, 1]), np.array([4, 11])
    nothing = Words(np.empty(0, np.int32), np.arange(3))
    sweep = SaberSweep.of(nothing, counts_WK, counts_WK.sum(0), alpha, beta, keys(0, 1, 1), None, 1)
    word_T, before_T = np.tile(words, documents), np.tile(before, documents).astype(np.uint16)
    drawn_D2 = sweep.numpy(word_T, np.repeat(np.arange(documents), 2), before_T, 0).reshape(-1, 2)

    def conditional(word: int, old: int, other: int) -> np.ndarray:
        own_K, count_K = np.eye(20)[other], counts_WK[words[word]] - np.eye(20)[old]
        weight_K = (own_K + alpha) * (count_K + beta) / (counts_WK.sum(0) + 3 * beta)
        return weight_K / weight_K.sum()

    first_K = np.bincount(drawn_D2[:, 0], minlength=20) / documents
    np.testing.assert_allclose(first_K, conditional(0, 4, 11), atol=0.012)
    for other in np.argsort(-first_K)[:3]:
        mine = drawn_D2[drawn_D2[:, 0] == other, 1]
        np.testing.assert_allclose(
            np.bincount(mine, minlength=20) / len(mine), conditional(1, 11, other), atol=3 / len(mine) ** 0.5
        )


def test_counts_are_those_of_the_topics_on_disk_and_a_killed_run_resumes(data: Shards, tmp_path: Path) -> None:
    whole, killed = sampler(data, tmp_path / "a"), sampler(data, tmp_path / "b")
    assert list(whole.run(6)) == [1, 2, 3, 4, 5, 6]
    for _ in islice(killed.run(6), 3):
        pass
    killed.topics_of(4, "r+")[:100] = 0  # the next iteration was half written
    resumed = sampler(data, tmp_path / "b")
    assert resumed.iteration == 3 and np.array_equal(resumed.counts_WK, killed.counts_WK)
    assert list(resumed.run(6)) == [4, 5, 6]
    assert np.array_equal(resumed.topics_of(6), whole.topics_of(6))
    assert np.array_equal(resumed.counts_WK, whole.counts_WK)


@pytest.mark.parametrize("compiled", [False, True])
def test_alias_tables_draw_in_proportion_to_the_counts(compiled: bool) -> None:
    counts_WK = np.array([[0, 1, 7, 0, 2], [5, 5, 5, 5, 5], [0, 0, 0, 0, 900], [3, 0, 1000, 1, 0]], np.int32)
    smoothing = UNIT // 10
    cells_WK = alias_table(counts_WK, smoothing)
    if compiled:
        library = native.library()
        if library is None:
            pytest.skip("no C compiler")
        cells_WK = np.empty_like(cells_WK)
        library.topics_alias(counts_WK.ctypes.data, cells_WK.ctypes.data, *counts_WK.shape, smoothing, 1)
    own_WK, other_WK = (cells_WK >> 16) / 65536, cells_WK & 0xFFFF
    own_WK[other_WK == np.arange(5)] = 1
    drawn_WK = own_WK.copy()
    for word in range(len(counts_WK)):
        np.add.at(drawn_WK[word], other_WK[word], 1 - own_WK[word])
    wanted_WK = counts_WK + 0.1
    np.testing.assert_allclose(drawn_WK / 5, wanted_WK / wanted_WK.sum(1, keepdims=True), atol=1e-4)


def test_a_long_document_is_read_in_pieces_and_has_one_topic(tmp_path: Path) -> None:
    data = planted(tmp_path / "data", documents=40, length=500, shard_tokens=1 << 20)
    pieces = list(blocks(data, 200))
    assert len(pieces) == 40 * 3 and sum(len(block.tokens_T) for block in pieces) == data.tokens
    assert [block.is_last for block in pieces[:3]] == [False, False, True]
    run = sampler(data, tmp_path / "work", block=200)
    for _ in run.run(40):
        pass
    found_D = np.concatenate([topic_D for _, topic_D, _ in run.by_document()])
    assert purity(found_D, np.arange(40) % TOPICS) == 1.0


def test_memory_does_not_grow_with_the_corpus(tmp_path: Path) -> None:
    peaks = []
    for documents in (200, 1600):
        data = planted(tmp_path / str(documents), documents, shard_tokens=6000)
        tracemalloc.start()
        run = sampler(data, tmp_path / f"{documents}-work", block=3000)
        run.iterate()
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.25 * peaks[0]


def test_words_that_are_everywhere_or_nowhere_are_left_out(data: Shards) -> None:
    words = choose_words(data, 0.25, 3)
    assert words.token_W.min() >= 1  # the end of a document is none
    share_V = np.array([np.mean([token in data.document(n) for n in range(data.documents)]) for token in range(100)])
    assert not set(np.flatnonzero(share_V > 0.25)) & set(words.token_W.tolist())
    with pytest.raises(UserError, match="too few share a word"):
        choose_words(data, 0.001, 3)


def test_a_mixture_by_topic_draws_the_topics_it_names(data: Shards, tmp_path: Path) -> None:
    planted_D = (np.arange(data.documents) % TOPICS).astype(float)
    data.add_column("domain", planted_D)
    phases = [{"share": 0.5, "weights": {"domain1": 1.0}}, {"share": 0.5, "weights": {"domain0": 1, "domain3": 3}}]
    recipe = make_recipe({"a": 1, "b": 1}, steps=32, batch=128, mix_by="domain", phases=phases)
    stream = TokenStream.open(data.directory, recipe)
    seen = np.zeros((2, TOPICS))
    for step, batch in enumerate(islice(stream, 32)):
        for token in batch.tokens_T.numpy():
            seen[step // 16, (token - 100) // 50] += token >= 100
    assert seen[0].argmax() == 1 and seen[0].sum() == seen[0, 1] > 500
    assert seen[1, 3] / seen[1].sum() == pytest.approx(0.75, abs=0.06) and seen[1, 1] == seen[1, 2] == 0
    view, section = divided(data, recipe.data)
    assert view.domains == [f"domain{n}" for n in range(TOPICS)] and data.domains == ["a", "b"]
    with pytest.raises(UserError, match='no source is named "domain7"; did you mean'):
        wrong = [{"share": 1.0, "weights": {"domain7": 1}}]
        TokenStream.open(data.directory, make_recipe({"a": 1}, mix_by="domain", phases=wrong))
    check_columns(make_recipe({"a": 1}, mix_by="topic", topics={"topics": 4}))
    with pytest.raises(UserError, match='data.mix_by: the data would have no column "topic"'):
        check_columns(make_recipe({"a": 1}, mix_by="topic"))
    data.add_column("grade", planted_D / 3)
    with pytest.raises(UserError, match="whole numbers"):
        divided(data, make_recipe({"a": 1}, mix_by="grade").data)


def test_the_recipe_prepares_topics_and_trains_on_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sources = "data.sources=[{name: sums, path: 'builtin:sums', documents: 300}]"
    short = [
        sources,
        "data.topics.topics=3",
        "data.topics.iterations=5",
        "data.topics.common=1.0",
        "model.vocab=300",
        "data.held_out=0.1",
    ]
    recipe = str(Path(__file__).parents[2] / "recipes/topics.yaml")
    steps = ["train.steps=2", "train.batch_tokens=256", "train.evaluate_every=2"]
    assert main(["train", recipe, "--out", str(tmp_path / "run"), *short, *steps]) == 0
    data = Shards(tmp_path / "run/data")
    assert set(data.column("topic").astype(int)) <= {0, 1, 2}
    capsys.readouterr()
    assert main(["topics", str(data.directory), "--topics", "2", "--iterations", "3", "--common", "1", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert len(report["topics"]) == 2 and all(topic["words"] for topic in report["topics"])
    assert sum(topic["documents"] for topic in report["topics"]) == data.documents
