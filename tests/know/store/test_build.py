"""A knowledge base from files: built, searched, brought up to date, and removed from."""

from __future__ import annotations

from pathlib import Path

import pytest

from moesaic.errors import UserError
from moesaic.know.build import build, remove
from moesaic.know.knowledge_base import KnowledgeBase


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    docs = tmp_path / "docs"
    (docs / "deep").mkdir(parents=True)
    (docs / "cats.md").write_text("# Cats\n\nCats sleep.\n\n## Food\n\nThey eat mice and drink milk.\n")
    (docs / "deep" / "dogs.txt").write_text("Dogs bark at the moon.\n")
    return docs


def found(base: Path, query: str) -> list[str]:
    with KnowledgeBase.open(base) as opened:
        return [hit.chunk.source for hit in opened.search(query, method="words")]


def test_what_is_built_is_found_with_where_it_stands(folder: Path, tmp_path: Path) -> None:
    built = build([folder], tmp_path / "kb")
    assert (built.added, built.documents, built.chunks, built.skipped) == (2, 2, 3, [])
    with KnowledgeBase.open(tmp_path / "kb") as base:
        hit, *_ = base.search("Who drinks milk?", method="words")
        assert (hit.chunk.source, hit.chunk.title, hit.chunk.headings) == ("docs/cats.md", "Cats", ("Cats", "Food"))
        assert base.text(hit.chunk.document)[hit.chunk.start : hit.chunk.end] == hit.chunk.text
        assert base.chunk(hit.row) == hit.chunk
        assert base.search("nobody said this") == []


def test_only_what_changed_is_indexed_again(folder: Path, tmp_path: Path) -> None:
    kb = tmp_path / "kb"
    build([folder], kb)
    (folder / "cats.md").write_text("# Cats\n\nThey prefer tuna.\n")
    (folder / "fish.txt").write_text("Fish swim.")
    built = build([folder], kb)
    assert (built.added, built.changed, built.unchanged, built.removed) == (1, 1, 1, 0)
    assert found(kb, "milk") == []
    assert found(kb, "tuna") == ["docs/cats.md"]
    assert found(kb, "bark") == ["docs/deep/dogs.txt"]
    before = sorted(kb.rglob("*"))
    assert build([folder], kb).unchanged == 3
    assert sorted(kb.rglob("*")) == before


def test_what_is_gone_from_the_folder_is_removed_unless_kept(folder: Path, tmp_path: Path) -> None:
    kb, other = tmp_path / "kb", tmp_path / "other.txt"
    other.write_text("Birds sing.")
    build([folder, other], kb)
    (folder / "deep" / "dogs.txt").unlink()
    other.unlink()
    assert build([folder], kb, keep=True).removed == 0
    assert found(kb, "bark") == ["docs/deep/dogs.txt"]
    assert build([folder], kb).removed == 1
    assert found(kb, "bark") == []
    assert found(kb, "birds") == ["other.txt"]  # of another place: untouched


def test_documents_are_removed_by_their_source_or_folder(folder: Path, tmp_path: Path) -> None:
    kb = tmp_path / "kb"
    build([folder], kb)
    assert remove(kb, ["docs/deep"]).documents == 1
    assert found(kb, "bark") == []
    with pytest.raises(UserError, match="no such document"):
        remove(kb, ["docs/deep"])


def test_texts_make_a_base_that_goes_with_its_object() -> None:
    base = KnowledgeBase.of_texts([("Paris", "Paris lies on the Seine."), ("Rome", "Rome lies on the Tiber.")])
    assert [hit.chunk.title for hit in base.search("Which river? The Tiber?", method="words")] == ["Rome"]
    path = base.path
    base.close()
    assert not path.exists()
