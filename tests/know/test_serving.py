"""Knowledge bases as a server opens and searches them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from moesaic.errors import UserError
from moesaic.know.build import build
from moesaic.know.serving import ServedBase, open_bases


@pytest.fixture
def kb(tmp_path: Path) -> Path:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "cats.md").write_text("# Cats\n\nCats sleep.\n\n## Food\n\nThey eat mice and drink milk.\n")
    build([tmp_path / "docs"], tmp_path / "kb")
    return tmp_path / "kb"


def test_a_passage_says_where_it_stands_and_can_be_fetched(kb: Path) -> None:
    base = ServedBase(kb)
    (found,) = base.search("Who drinks milk?", 4, "words")
    assert (found.source, found.title) == ("docs/cats.md", "Cats › Food")
    document = base.fetch(found.document)
    assert document is not None and document.text[found.start : found.end] == found.text
    again = base.fetch(found.id)
    assert again is not None and (again.text, again.start) == (found.text, found.start)
    for wrong in ("", "0", "²-x", "999999-x", f"1{found.id}", "../../etc/passwd", found.id.partition("-")[2]):
        assert base.fetch(wrong) is None


def test_a_base_that_was_built_anew_is_searched_anew(kb: Path) -> None:
    base = ServedBase(kb)
    assert base.search("Who barks?", 4, "words") == []
    (kb.parent / "docs" / "dogs.txt").write_text("A dog barks.")
    build([kb.parent / "docs"], kb)
    assert [one.source for one in base.search("Who barks?", 4, "words")] == ["docs/dogs.txt"]
    assert base.rows == 3


def test_bases_are_named_by_their_directory_or_by_the_user(kb: Path) -> None:
    bases = open_bases([str(kb), f"pets={kb}"])
    assert list(bases.bases) == ["kb", "pets"]
    found = asyncio.run(bases.search(["kb", "pets"], "milk", 2))
    assert [one.base for one in found] == ["kb", "pets"]
    bases.close()


@pytest.mark.parametrize("wrong", [["nowhere"], ["a b={kb}"], ["{kb}", "{kb}"], ["={kb}"]])
def test_wrong_bases_are_refused(kb: Path, wrong: list[str]) -> None:
    with pytest.raises(UserError):
        open_bases([word.replace("{kb}", str(kb)) for word in wrong])


def test_a_damaged_base_is_refused_before_anything_is_served(kb: Path) -> None:
    for file in kb.rglob("*.npy"):
        file.unlink()
    with pytest.raises(UserError, match="cannot be searched"):
        open_bases([str(kb)])
