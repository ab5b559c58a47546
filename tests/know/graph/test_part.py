"""The graph of a base: written by segment, opened over all, merged, and without what was deleted."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from moesaic.know.chunk import Chunk
from moesaic.know.graph.graph import Graph
from moesaic.know.graph.part import GraphPart
from moesaic.know.graph.triple import Triple
from moesaic.know.store.part import Segment

TEXTS = {
    "Green (album)": "Green is an album by Steve Hillage.",
    "Steve Hillage": "Steve Hillage is an English musician. Hillage is married to Miquette Giraudy.",
    "Miquette Giraudy": "Miquette Giraudy was born in Nice.",
    "Nice": "Nice is a city in France.",
}


def chunks(*titles: str) -> list[Chunk]:
    return [Chunk(title, title, title, title, TEXTS[title], 0, len(TEXTS[title])) for title in titles]


def segment(folder: Path, first: int, *titles: str) -> Segment:
    (folder / "graph").mkdir(parents=True)
    GraphPart().write(folder / "graph", chunks(*titles))
    return Segment(folder, first, np.ones(len(titles), bool))


def same(one: Graph, two: Graph) -> bool:
    return (
        one.entities == two.entities
        and list(one.triples()) == list(two.triples())
        and np.array_equal(one.mentions, two.mentions)
    )


def test_segments_are_one_graph(tmp_path: Path) -> None:
    first = segment(tmp_path / "a", 0, "Green (album)", "Steve Hillage")
    second = segment(tmp_path / "b", 2, "Miquette Giraudy", "Nice")
    graph = GraphPart().open([first, second])
    assert graph.chunks_of("steve hillage") == [0, 1]
    assert graph.chunks_of("Miquette Giraudy") == [1, 2]
    assert "Nice" in graph.entities_of(2)
    assert Triple("Miquette Giraudy", "born in", "Nice", 2) in list(graph.triples())
    assert graph.chunks_of("nobody") == []
    whole = GraphPart().open([segment(tmp_path / "c", 0, *TEXTS)])
    assert same(graph, whole)


def test_the_dead_are_not_opened_and_merging_forgets_them(tmp_path: Path) -> None:
    first = segment(tmp_path / "a", 0, "Green (album)", "Steve Hillage")
    second = segment(tmp_path / "b", 2, "Miquette Giraudy", "Nice")
    first.alive[1] = False
    graph = GraphPart().open([first, second])
    assert graph.chunks_of("Miquette Giraudy") == [2]
    merged = tmp_path / "merged"
    (merged / "graph").mkdir(parents=True)
    GraphPart().merge(merged / "graph", [first, second])
    fresh = segment(tmp_path / "fresh", 0, "Green (album)", "Miquette Giraudy", "Nice")
    for file in sorted((fresh.folder / "graph").iterdir()):
        assert (merged / "graph" / file.name).read_bytes() == file.read_bytes(), file.name


def test_a_question_names_entities(tmp_path: Path) -> None:
    graph = GraphPart().open([segment(tmp_path / "a", 0, *TEXTS)])
    assert set(graph.mentioned("Who is the spouse of Steve Hillage?")) == {"Steve Hillage"}
    assert "Steve Hillage" in graph.mentioned("Where does Hillage live?")  # part of one name
    assert graph.mentioned("who is it?") == {}
    pairs = {frozenset((graph.entities[a], graph.entities[b])) for a, b in graph.synonyms}
    assert frozenset(("Green (album)", "Green")) in pairs


def test_an_empty_base_opens(tmp_path: Path) -> None:
    graph = GraphPart().open([])
    assert graph.entities == [] and list(graph.triples()) == [] and graph.mentioned("Anything?") == {}
    assert graph.counts.shape == (0, 0)


def test_names_with_near_vectors_are_joined(tmp_path: Path) -> None:
    graph = GraphPart().open([segment(tmp_path / "a", 0, *TEXTS)])
    before = len(graph.synonyms)
    # Of letters: "Steve Hillage" is near nothing that shares a word with it, "Green" is near "Green (album)".
    vectors = np.array([[name.lower().count(chr(97 + n)) for n in range(26)] for name in graph.entities], np.float32)
    vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-9)
    assert graph.align(lambda names: vectors, least=1.1) == before
    after = graph.align(lambda names: vectors, least=0.6)
    assert after >= before
    places = [frozenset(pair) for pair in graph.synonyms.tolist()]
    assert frozenset((graph.places["green"], graph.places["green album"])) in places
    assert len(set(places)) == len(places)
