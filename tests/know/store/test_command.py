"""moesaic know build, show and remove, as they are typed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from moesaic.cli import main


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["know", *words])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_build_show_and_remove(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("docs").mkdir()
    Path("docs/cats.md").write_text("# All cats\n\nCats sleep.\n")
    Path("docs/owls.txt").write_text("Owls hunt.")
    Path("docs/p.png").write_bytes(b"\x89PNG")
    Path(os.fsdecode(b"docs/\xff.txt")).write_text("A name that is no Unicode.")
    code, out, _ = run(capsys, "build", "docs", "--out", "kb")
    assert code == 0
    assert "skipped docs/p.png: there is no reader for .png" in out
    assert "3 added. kb holds 3 documents in 3 chunks." in out
    assert "3 unchanged." in run(capsys, "build", "docs", "--out", "kb")[1]
    code, out, _ = run(capsys, "show", "kb")
    assert "docs/cats.md  1 chunks  All cats\n" in out and "searched by words, graph." in out
    shown = json.loads(run(capsys, "show", "kb", "--json")[1])
    assert [document["source"] for document in shown["documents"]] == [
        "docs/cats.md",
        "docs/owls.txt",
        "docs/\ufffd.txt",
    ]
    assert (shown["chunks"], shown["segments"], list(shown["parts"])) == (3, 1, ["words", "graph"])
    removed = json.loads(run(capsys, "remove", "kb", "docs/owls.txt", "--json")[1])
    assert (removed["removed"], removed["documents"]) == (1, 2)
    code, _, err = run(capsys, "remove", "kb", "docs/owls.txt")
    assert code == 2 and "docs/owls.txt: kb has no such document" in err
    code, _, err = run(capsys, "show", "docs")
    assert code == 2 and "is no knowledge base" in err
    code, _, err = run(capsys, "build", "missing", "--out", "other")
    assert code == 2 and "no such file" in err and not Path("other").exists()
