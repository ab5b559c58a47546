"""Vectors of a knowledge base over its segments: written, merged, opened, searched; the dead are not found."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from moesaic.errors import UserError
from moesaic.kernels import native
from moesaic.know.chunk import Chunk
from moesaic.know.search import vectors as vectors_module
from moesaic.know.search.vectors import VectorPart, Vectors, passage
from moesaic.know.store.part import Segment
from moesaic.nearest import exact


class Scattered:
    """A stand-in for a model: a text's vector is drawn by its own checksum."""

    name, dimensions = "scattered", 24

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        drawn = [np.random.default_rng(zlib.crc32(text.encode())).normal(size=self.dimensions) for text in texts]
        rows_ND = np.array(drawn, dtype=np.float32).reshape(-1, self.dimensions)
        return rows_ND / np.linalg.norm(rows_ND, axis=1, keepdims=True)


def chunk(text: str, title: str = "") -> Chunk:
    return Chunk(id=text, document="d", source="d.txt", title=title, text=text, start=0, end=len(text))


def written(folder: Path, part: VectorPart, texts: Sequence[str], first: int, dead: Sequence[int] = ()) -> Segment:
    (folder / part.name).mkdir(parents=True)
    part.write(folder / part.name, [chunk(text) for text in texts])
    alive = np.ones(len(texts), dtype=bool)
    alive[list(dead)] = False
    return Segment(folder, first, alive)


@pytest.fixture
def part() -> VectorPart:
    return VectorPart(Scattered())


def test_each_text_finds_itself_over_segments(tmp_path: Path, part: VectorPart) -> None:
    texts = [f"text {number}" for number in range(30)]
    segments = [
        written(tmp_path / "a", part, texts[:20], 0, dead=[3]),
        written(tmp_path / "b", part, [], 20),
        written(tmp_path / "c", part, texts[20:], 20),
    ]
    vectors = part.open(segments)
    assert isinstance(vectors, Vectors) and len(vectors) == 30
    for number, vector_D in enumerate(part.embedder.embed(texts)):
        rows_K, scores_K = vectors.search(vector_D, 5)
        assert len(rows_K) == 5 and (np.diff(scores_K) <= 0).all() and 3 not in rows_K
        if number != 3:
            assert rows_K[0] == number and scores_K[0] == pytest.approx(1, abs=1e-6)
    assert len(vectors.search(vector_D, 100)[0]) == 29
    np.testing.assert_array_equal(vectors.vector(25), part.embedder.embed([texts[25]])[0])


def test_merging_gives_what_writing_would_have_given(tmp_path: Path, part: VectorPart) -> None:
    texts = [f"text {number}" for number in range(9)]
    segments = [written(tmp_path / "a", part, texts[:5], 0, dead=[1, 4]), written(tmp_path / "b", part, texts[5:], 5)]
    (tmp_path / "m").mkdir()
    part.merge(tmp_path / "m", segments)
    alone = written(tmp_path / "w", part, [text for number, text in enumerate(texts) if number not in (1, 4)], 0)
    assert (tmp_path / "m" / "vectors.npy").read_bytes() == (alone.folder / "vectors" / "vectors.npy").read_bytes()


def test_nothing_at_all_can_be_searched(tmp_path: Path, part: VectorPart) -> None:
    query_D = part.embedder.embed(["anything"])[0]
    for segments in ([], [written(tmp_path / "a", part, [], 0)], [written(tmp_path / "b", part, ["x"], 0, dead=[0])]):
        rows_K, scores_K = part.open(segments).search(query_D, 3)
        assert rows_K.shape == scores_K.shape == (0,)


def test_vectors_of_another_model_are_refused(tmp_path: Path, part: VectorPart) -> None:
    segment = written(tmp_path / "a", part, ["x"], 0)
    with pytest.raises(UserError, match="another embedding model"):
        Vectors([segment], "vectors", 25)


def test_a_title_is_embedded_with_its_text_once() -> None:
    assert passage(chunk("It is red.", "Apple")) == "Apple\nIt is red."
    assert passage(chunk("Apple\n\nIt is red.", "Apple")) == "Apple\n\nIt is red."


@pytest.fixture
def few_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vectors_module, "EXACT", 300)
    monkeypatch.setattr(vectors_module, "LARGE", 200)
    monkeypatch.setattr(vectors_module, "POOL", 40)


@pytest.mark.skipif(native.kernels() is None, reason="no C compiler")
def test_a_large_segment_is_searched_by_its_graph_and_the_rest_exactly(
    tmp_path: Path, part: VectorPart, few_are_many: None
) -> None:
    texts = [f"text {number}" for number in range(700)]
    dead = list(range(0, 600, 7))
    segments = [written(tmp_path / "a", part, texts[:600], 0, dead), written(tmp_path / "b", part, texts[600:], 600)]
    vectors = part.open(segments)
    assert [graph is not None for graph in vectors.graphs] == [True, False]
    everything_ND = part.embedder.embed(texts)
    alive_N = np.concatenate([segment.alive for segment in segments])
    hits = 0
    for vector_D in everything_ND[::10]:
        rows_K, scores_K = vectors.search(vector_D, 5)
        (true_K,), _ = exact.search(everything_ND, vector_D[None], 5, alive_N=alive_N)
        hits += len(set(rows_K.tolist()) & set(true_K.tolist()))
        assert alive_N[rows_K].all() and (np.diff(scores_K) <= 0).all()
        np.testing.assert_allclose(scores_K, everything_ND[rows_K] @ vector_D, atol=1e-6)
    assert hits >= 0.95 * 70 * 5


@pytest.mark.skipif(native.kernels() is None, reason="no C compiler")
def test_the_graph_of_a_large_segment_reports_how_far_it_is(tmp_path: Path, few_are_many: None) -> None:
    told: list[tuple[str, int, int]] = []
    part = VectorPart(Scattered(), lambda what, done, total: told.append((what, done, total)))
    written(tmp_path / "a", part, [f"text {number}" for number in range(260)], 0)
    embedding = [line for line in told if line[0] == "embedding"]
    assert embedding[0] == ("embedding", vectors_module.BATCH, 260) and embedding[-1] == ("embedding", 260, 260)
    connecting = [done for what, done, total in told if what == "connecting vectors" and total == 260]
    assert len(connecting) >= 2 and connecting == sorted(connecting) and connecting[-1] <= 260


@pytest.mark.skipif(native.kernels() is None, reason="no C compiler")
def test_what_is_asked_for_is_found_though_all_near_it_was_deleted(
    tmp_path: Path, part: VectorPart, few_are_many: None
) -> None:
    texts = [f"text {number}" for number in range(400)]
    query_D = part.embedder.embed(["query"])[0]
    near = np.argsort(-part.embedder.embed(texts) @ query_D)
    vectors = part.open([written(tmp_path / "a", part, texts, 0, near[:380].tolist())])
    assert vectors.graphs[0] is not None
    assert vectors.search(query_D, 5)[0].tolist() == near[380:385].tolist()
    assert sorted(vectors.search(query_D, 50)[0].tolist()) == sorted(near[380:].tolist())
