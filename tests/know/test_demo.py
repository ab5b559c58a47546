"""The demo, small: Python's own documentation or a folder, with quotes, and with a model that a test speaks for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from moesaic.cli import main
from moesaic.know.answer.writer import Conversation, Form
from moesaic.know.demo import ask_all
from moesaic.know.knowledge_base import KnowledgeBase
from moesaic.know.python_documents import write_python_documents


class Scripted:
    def __init__(self, text: str) -> None:
        self.text = text
        self.asked: list[Conversation] = []

    def write(
        self,
        conversations: Sequence[Conversation],
        *,
        max_tokens: int,
        form: Form | None = None,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> list[str]:
        self.asked += conversations
        return [self.text] * len(conversations)


def test_pythons_documentation_is_written_without_running_it(tmp_path: Path) -> None:
    assert write_python_documents(tmp_path, ("bisect", "heapq", "nothing_of_this_name")) >= 3
    assert "## bisect.insort_right" in (tmp_path / "bisect.md").read_text()
    assert '"with" statement' in (tmp_path / "reference-with.rst").read_text()


def test_the_demo_quotes_any_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "rivers.md").write_text("# Rivers\n\nThe Danube ends in the Black Sea. The Mur is short.\n")
    words = ["know", "demo", "--folder", str(tmp_path / "docs"), "--out", str(tmp_path / "out"), "--quotes-only"]
    words += ["--words-only", "--question", "Where does the Danube end?"]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "“The Danube ends in the Black Sea.”" in shown and "docs/rivers.md:" in shown
    assert f"moesaic know show {tmp_path / 'out' / 'kb'}" in shown
    assert main([*words, "--json"]) == 0  # the base is brought up to date, not built anew
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert (report["documents"], report["model"], report["vectors"]) == (1, None, False)
    assert report["questions"][0]["quotes"][0]["text"] == "The Danube ends in the Black Sea."


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["know", "demo", "--folder", str(tmp_path / "no"), "--out", str(tmp_path / "out")]) == 2
    assert "no such folder" in capsys.readouterr().err


def test_only_what_a_passage_bears_is_told() -> None:
    base = KnowledgeBase.of_texts([("Rivers", "The Danube ends in the Black Sea. The Mur is short.")])
    said = "The Danube ends in the Black Sea [1]. The Danube ends in the Black Sea [1]. It is in Peru [1]."
    (one,) = ask_all(base, ["Where does the Danube end?"], Scripted(said))
    assert one.answer == "The Danube ends in the Black Sea [1]."
    assert one.quotes[0].text == "The Danube ends in the Black Sea."
    (other,) = ask_all(base, ["Where does the Danube end?"], Scripted("It ends in Lake Titicaca [1]."))
    assert other.answer == "Not in the texts." and other.quotes
