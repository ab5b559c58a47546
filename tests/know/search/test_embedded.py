"""No text is embedded twice: after a kill, where a document changed, where passages are the same."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from moesaic.know import parts
from moesaic.know.build import build
from moesaic.know.chunk import Chunk
from moesaic.know.knowledge_base import KnowledgeBase
from moesaic.know.parts import Asked
from moesaic.know.search.embedded import Embedded
from moesaic.know.search.vectors import BATCH, FILE, VectorPart


class Counting:
    """Draws a text's vector by its checksum, counts what it is asked, and stops where it is told to."""

    name, dimensions = "counting", 24

    def __init__(self, stop_after: int = 10**9) -> None:
        self.asked: list[str] = []
        self.stop_after = stop_after

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        if len(self.asked) + len(texts) > self.stop_after:
            raise KeyboardInterrupt
        self.asked += texts
        rows = [np.random.default_rng(zlib.crc32(text.encode())).normal(size=self.dimensions) for text in texts]
        made: np.ndarray = np.array(rows, dtype=np.float32).reshape(-1, self.dimensions)
        return made / np.linalg.norm(made, axis=1, keepdims=True)

    def embed_query(self, text: str) -> np.ndarray:
        found: np.ndarray = self.embed([text])[0]
        return found


def chunks(numbers: range) -> list[Chunk]:
    return [Chunk(str(n), "d", "d.txt", "", f"text {n}", 0, 6) for n in numbers]


def written(folder: Path, embedder: Counting, base: Path, numbers: range) -> np.ndarray:
    folder.mkdir()
    VectorPart(Embedded(embedder, base, "it")).write(folder, chunks(numbers))
    found: np.ndarray = np.load(folder / FILE)
    return found


def test_a_build_goes_on_where_one_was_killed(tmp_path: Path) -> None:
    plain = Counting().embed([chunk.text for chunk in chunks(range(3 * BATCH))])
    first, second = Counting(stop_after=2 * BATCH), Counting()
    with pytest.raises(KeyboardInterrupt):
        written(tmp_path / "killed", first, tmp_path, range(3 * BATCH))
    left = next(tmp_path.glob(".embedded-*"))
    whole = left.read_bytes()
    size = len(whole) // (2 * BATCH)
    # The last record was not written to its end, and one before it lies wrong on the disk.
    left.write_bytes(whole[: 5 * size - 7] + bytes([whole[5 * size - 7] ^ 1]) + whole[5 * size - 6 : -11])
    assert np.array_equal(written(tmp_path / "again", second, tmp_path, range(3 * BATCH)), plain)
    lost = ["text 4", f"text {2 * BATCH - 1}"]
    assert second.asked == [lost[0], lost[1], *(f"text {n}" for n in range(2 * BATCH, 3 * BATCH))]
    third = Counting()
    assert np.array_equal(written(tmp_path / "third", third, tmp_path, range(3 * BATCH)), plain) and not third.asked


def test_what_was_made_of_other_segments_or_models_is_forgotten(tmp_path: Path) -> None:
    written(tmp_path / "one", Counting(), tmp_path, range(5))
    written(tmp_path / "two", Counting(), tmp_path, range(10, 15))  # begins when the first one is in its place
    (file,) = tmp_path.glob(".embedded-*")
    assert file.stat().st_size == 5 * (16 + 4 + 4 * 24)
    other = Counting()
    folder = tmp_path / "three"
    folder.mkdir()
    VectorPart(Embedded(other, tmp_path, "another")).write(folder, chunks(range(10, 15)))
    assert len(other.asked) == 5


def test_a_changed_document_embeds_what_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, docs, kb = tmp_path / "model", tmp_path / "docs", tmp_path / "kb"
    model.mkdir()
    docs.mkdir()
    (model / "config.json").write_text("{}")
    asked = Counting()
    monkeypatch.setattr(parts, "_opened", lambda path, bits: asked)
    sections = [f"# Part {n}\n\nWhat stands in part {n} is of {n} words.\n" for n in range(6)]
    (docs / "a.md").write_text("\n".join(sections))
    (docs / "b.txt").write_text("The same notice.")
    (docs / "c.txt").write_text("The same notice.")
    build([docs], kb, asked=Asked(model))
    assert len(asked.asked) == len(set(asked.asked)) and not list(kb.glob(".embedded-*"))
    asked.asked.clear()
    sections[3] = "# Part 3\n\nIt says something else now.\n"
    (docs / "a.md").write_text("\n".join(sections))
    build([docs], kb)
    assert len(asked.asked) == 1 and "something else" in asked.asked[0]
    with KnowledgeBase.open(kb) as base:
        for row, chunk in base.chunks():
            hit = base.search(f"{chunk.title}\n{chunk.text}", k=1, method="vectors")[0]
            assert hit.chunk.text == chunk.text, row
