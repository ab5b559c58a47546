"""Files that are replaced whole, and JSON that is refused with its place and a remedy."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from moesaic import atomic
from moesaic.errors import UserError
from moesaic.json_files import object_or_empty, read_json


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    atomic.write_json(file, {"a": 1}, indent=1)
    atomic.write_json(file, {"a": "ü", "b": tmp_path}, default=str)
    assert json.loads(file.read_text()) == {"a": "ü", "b": str(tmp_path)} and file.read_text().endswith("\n")
    atomic.write_text(file, "ü")
    assert file.read_bytes() == "ü".encode() and os.listdir(tmp_path) == ["a.json"]


def test_what_fails_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    atomic.write_text(file, "before")
    with pytest.raises(TypeError):
        atomic.write_json(file, {"a": object()})
    with pytest.raises(KeyError), atomic.replacing_file(file) as fresh:
        fresh.write_text("half")
        raise KeyError
    with pytest.raises(OSError, match="a.json") as caught, atomic.replacing_file(file) as fresh:
        fresh.write_text("half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(fresh))
    assert caught.value.errno == errno.ENOSPC and caught.value.filename == str(file)
    assert file.read_text() == "before" and os.listdir(tmp_path) == ["a.json"]


def test_a_link_takes_the_place_of_a_file_and_of_a_link(tmp_path: Path) -> None:
    for target in ("one", "two"):
        (tmp_path / target).write_text(target)
    (tmp_path / "shown").write_text("a file")
    for target in ("one", "two"):
        atomic.write_link(tmp_path / "shown", target)
        assert (tmp_path / "shown").is_symlink() and (tmp_path / "shown").read_text() == target
    with atomic.replacing_file(tmp_path / "shown") as fresh:  # a name of its own for what the link leads to
        os.link(tmp_path / "two", fresh)
    assert not (tmp_path / "shown").is_symlink() and (tmp_path / "shown").read_text() == "two"
    assert sorted(os.listdir(tmp_path)) == ["one", "shown", "two"]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"{", "is not JSON"),
        (b"", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"[1]", "holds a list, not a JSON object"),
        (b'{"a": "\xff"}', "is not UTF-8 text"),
    ],
)
def test_what_is_no_json_object_is_refused_with_the_remedy(tmp_path: Path, content: bytes, problem: str) -> None:
    file = tmp_path / "a.json"
    file.write_bytes(content)
    with pytest.raises(UserError, match=problem) as caught:
        read_json(file, "Do this.", missing="Do that.")
    assert caught.value.place == str(file) and caught.value.remedy == "Do this."
    assert object_or_empty(content) == {}


def test_a_missing_file_has_a_remedy_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file") as caught:
        read_json(tmp_path / "none", "Do this.", missing="Do that.")
    assert caught.value.remedy == "Do that."
    with pytest.raises(UserError, match="is not a file. Do this"):
        read_json(tmp_path, "Do this.")
    assert object_or_empty(None) == {} and object_or_empty(b'{"a": 1}') == {"a": 1}
