"""The directory of a base: readers keep what they opened, one writes at a time, merges are bounded, parts are added."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from moesaic.atomic import exclusive
from moesaic.errors import UserError
from moesaic.know import parts
from moesaic.know.build import build, remove
from moesaic.know.knowledge_base import KnowledgeBase
from moesaic.know.parts import Asked
from moesaic.know.store import directory


class Lengths:
    """An embedding model that knows two things of a text. Counts what it is asked."""

    name, dimensions = "lengths", 2

    def __init__(self) -> None:
        self.texts: list[str] = []

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        self.texts += texts
        vectors = np.array([[len(text), text.count("e")] for text in texts], np.float32)
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)

    def embed_query(self, text: str) -> np.ndarray:
        found: np.ndarray = self.embed([text])[0]
        return found


def write(folder: Path, **texts: str) -> Path:
    folder.mkdir(exist_ok=True)
    for name, text in texts.items():
        (folder / f"{name}.txt").write_text(text)
    return folder


def test_a_reader_keeps_what_it_opened(tmp_path: Path) -> None:
    docs, kb = write(tmp_path / "docs", a="old apples", b="pears"), tmp_path / "kb"
    build([docs], kb)
    reader = KnowledgeBase.open(kb)
    write(docs, a="new oranges", b="melons")
    build([docs], kb, compact=True)
    assert [hit.chunk.text for hit in reader.search("apples", method="words")] == [
        "old apples"
    ]  # its words are opened only now
    assert reader.graph is not None and reader.search("oranges", method="words") == []
    assert len(list((kb / "segments").iterdir())) == 2
    reader.close()
    build([docs], kb)
    assert len(list((kb / "segments").iterdir())) == 1
    assert len(list(kb.glob("manifest-*"))) == 1


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    docs, kb = write(tmp_path / "docs", a="apples"), tmp_path / "kb"
    build([docs], kb)
    with exclusive(kb), pytest.raises(UserError, match="another moesaic is writing here"):
        build([docs], kb)
    assert build([docs], kb).unchanged == 1


def test_what_is_no_base_is_left_alone(tmp_path: Path) -> None:
    docs = write(tmp_path / "docs", a="apples")
    with pytest.raises(UserError, match="holds other things"):
        build([docs], docs)
    with pytest.raises(UserError, match="no such knowledge base"):
        remove(tmp_path / "kb", ["a"])
    assert not (tmp_path / "kb").exists()
    with pytest.raises(UserError, match="is no knowledge base"):
        KnowledgeBase.open(docs)
    build([tmp_path], tmp_path / "kb")  # inside of what is indexed: it is not indexed itself
    assert build([tmp_path], tmp_path / "kb").documents == 1


@pytest.mark.parametrize("content", ["{", "[]", '{"format": 9}', '{"format": 1}'])
def test_a_damaged_manifest_is_told(tmp_path: Path, content: str) -> None:
    (tmp_path / "manifest-1.json").write_text(content)
    with pytest.raises(UserError, match=r"manifest-1\.json"):
        KnowledgeBase.open(tmp_path)


def test_many_small_builds_make_few_segments_and_bounded_merges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory, "AT_ONCE", 16)
    monkeypatch.setattr(directory, "FAN_IN", 4)
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # which is most of the time
    merged: list[int] = []
    join = directory.Writer._join
    monkeypatch.setattr(
        directory.Writer,
        "_join",
        lambda self, group: (merged.append(sum(self.entries[n].chunks for n in group)), join(self, group))[1],
    )
    kb = tmp_path / "kb"
    for number in range(40):
        build([write(tmp_path, **{f"t{number}": f"Text number{number}."}) / f"t{number}.txt"], kb)
    with KnowledgeBase.open(kb) as base:
        assert base.chunk_count == base.rows == 40
        assert len(base.segments) < 16
        for number in (0, 20, 39):
            assert [hit.chunk.source for hit in base.search(f"number{number}", method="words")] == [f"t{number}.txt"]
    assert max(merged) <= 16
    assert sum(merged) < 40 * 4  # each chunk is written again a few times at most
    build([], kb, compact=True)
    with KnowledgeBase.open(kb) as base:
        assert (len(base.segments), base.chunk_count) == (1, 40)


def test_what_was_deleted_is_dropped_when_it_is_half(tmp_path: Path) -> None:
    docs, kb = write(tmp_path / "docs", **{f"t{n}": f"text{n}" for n in range(8)}), tmp_path / "kb"
    build([docs], kb)
    for number in range(3):
        remove(kb, [f"docs/t{number}.txt"])
    with KnowledgeBase.open(kb) as base:
        assert (base.rows, base.chunk_count) == (8, 5)
        assert base.search("text1", method="words") == [] and len(base.search("text5", method="words")) == 1
    remove(kb, ["docs/t3.txt"])
    with KnowledgeBase.open(kb) as base:
        assert (base.rows, base.chunk_count) == (4, 4)


def test_vectors_are_added_to_what_is_there_and_never_made_twice(tmp_path: Path) -> None:
    docs, kb = write(tmp_path / "docs", a="eel", b="a text that is longer"), tmp_path / "kb"
    build([docs], kb, asked=Asked(extract="none"))
    model = Lengths()
    asked = Asked(embedder=model)
    build([docs], kb, asked=asked)
    write(docs, c="three")
    build([docs], kb, asked=asked)
    build([docs], kb, asked=asked, compact=True)
    assert len(model.texts) == 3
    with KnowledgeBase.open(kb) as base:
        assert list(base.manifest.parts) == ["words", "vectors"]
        assert base.graph is None and base.chunk_count == 3


def test_a_base_refuses_another_embedding_model_and_finds_its_own_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    docs, kb = write(tmp_path / "docs", a="eel", b="owl"), tmp_path / "kb"
    models = [tmp_path / "one", tmp_path / "two"]
    for model in models:
        model.mkdir()
        (model / "config.json").write_text(json.dumps({"name": model.name}))
    opened: list[int] = []
    monkeypatch.setattr(parts, "_opened", lambda path, bits: opened.append(bits) or Lengths())
    build([docs], kb, asked=Asked(models[0]))
    with KnowledgeBase.open(kb) as base:
        assert [hit.chunk.text for hit in base.search("eel", 1, "vectors")] == ["eel"]
    assert opened == [8, 32]  # passages, queries
    with pytest.raises(UserError, match="is another"):
        build([docs], kb, asked=Asked(models[1]))
    with pytest.raises(UserError, match="are of 8 bits, not 32"):
        build([docs], kb, asked=Asked(models[0], 32))
    with pytest.raises(UserError, match="needs an embedding model"):
        build([docs], kb, asked=Asked(bits=8))
    build([write(docs, c="crow")], kb)  # with the recorded one
    models[0].rename(tmp_path / "moved")
    remove(kb, ["docs/c.txt"])  # needs no model
    with pytest.raises(UserError, match="is gone"):
        build([write(docs, d="swan")], kb)
    assert build([docs], kb, asked=Asked(tmp_path / "moved")).documents == 4
    shutil.copytree(models[1], models[0])
    with KnowledgeBase.open(kb) as base:
        assert len(base.search("swan", 9, "vectors")) == 4
        assert base.manifest.embedder["path"] == os.path.realpath(tmp_path / "moved")


def test_search_says_what_is_missing(tmp_path: Path) -> None:
    base = KnowledgeBase.of_texts([("a", "eel")])
    with pytest.raises(UserError, match="--embed DIR"):
        base.search("eel", method="vectors")
    with pytest.raises(UserError, match="not one of"):
        base.search("eel", method="magic")
    with pytest.raises(IndexError):
        base.chunk(1)


def test_segments_too_large_to_merge_all_at_once_are_merged_in_part() -> None:
    def sizes(*chunks: int) -> list[directory.Entry]:
        return [directory.Entry(str(number), 1, count) for number, count in enumerate(chunks)]

    assert directory._mergeable(sizes(*[1000] * 8), 4096, False) == [0, 1, 2, 3]
    assert directory._mergeable(sizes(*[1] * 7), 4096, False) == []
    assert directory._mergeable(sizes(20_000, *[1] * 8), 4096, False) == list(range(1, 9))
    assert directory._mergeable(sizes(*[5000] * 20), 4096, False) == []
    assert directory._mergeable(sizes(*[5000] * 20), 10**6, False) == list(range(20))
    entries: list[directory.Entry] = []
    for number in range(20_000):
        entries.append(directory.Entry(str(number), 1, 1))
        while group := directory._mergeable(entries, 4096, False):
            merged = directory.Entry("m", 1, sum(entries[place].chunks for place in group))
            entries = [entry for place, entry in enumerate(entries) if place not in group] + [merged]
    assert len(entries) < 40 and sum(entry.chunks for entry in entries) == 20_000
