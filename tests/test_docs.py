"""What the documents say holds: every command line is one that the program takes, every link leads somewhere."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer

from moesaic.cli.app import make_app

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PLACEHOLDERS = {"NAME", "NAME[,NAME]", "FILE", "DIR", "RECIPE"}


def command_lines() -> list[tuple[str, str]]:
    found = []
    for document in DOCUMENTS:
        blocks = re.findall(r"^```(\w*)\n(.*?)^```", document.read_text(), re.S | re.M)
        for block in [text for language, text in blocks if not language]:
            joined = re.sub(r"\\\n\s*", "", block)
            found += [(document.name, line.strip()) for line in joined.splitlines() if line.startswith("moesaic ")]
    return found


@pytest.fixture(scope="module")
def app() -> typer.core.TyperGroup:
    found = typer.main.get_command(make_app(everything=True))
    assert isinstance(found, typer.core.TyperGroup)
    return found


@pytest.mark.parametrize(("document", "line"), command_lines())
def test_a_command_line_is_understood(app, document: str, line: str) -> None:
    words = shlex.split(re.split(r"\s{3,}|\s+#", line)[0].partition(" > ")[0].partition(" && ")[0])[1:]
    words = [word for word in words if not re.fullmatch(r"\[.*|.*\]|\.\.\.", word)]  # what may be left out
    command, name = app, "moesaic"
    while isinstance(command, typer.core.TyperGroup) and words and not words[0].startswith("-"):
        name, command = words[0], command.commands[words[0]]
        words = words[1:]
    if not any("|" in word for word in words):
        command.make_context(name, words, resilient_parsing=bool(PLACEHOLDERS & set(words)))


def test_every_command_and_option_has_help(app) -> None:
    def silent(command, name: str) -> list[str]:
        if isinstance(command, typer.core.TyperGroup):
            return [one for own, inner in command.commands.items() for one in silent(inner, f"{name} {own}")]
        named = [f"{name} {parameter.name}" for parameter in command.params if not getattr(parameter, "help", None)]
        return named if command.help else [name, *named]

    assert silent(app, "moesaic") == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", document.read_text())
    assert [link for link in links if not (document.parent / link).exists()] == []


def test_there_is_something_to_check() -> None:
    assert len(command_lines()) > 20
