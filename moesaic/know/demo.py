"""A knowledge base of Python's own documentation, or of any folder, and a few questions to it: `moesaic know demo`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moesaic.errors import UserError
from moesaic.know.answer.answering import Answerer, quotes
from moesaic.know.answer.untrusted import printable
from moesaic.know.answer.writer import Writer
from moesaic.know.build import Built, build
from moesaic.know.knowledge_base import KnowledgeBase
from moesaic.know.parts import Asked
from moesaic.know.python_documents import write_python_documents
from moesaic.model.convert import convert_model
from moesaic.model.minilm import find_minilm

Progress = Callable[[str, int, int], None]

QUESTIONS = (
    "How do I cache the results of a function?",
    "What happens in a finally clause when an exception is raised?",
    "How can I copy a whole directory tree?",
)
MOST_CHARS = 400  # of a quote on the terminal


@dataclass(frozen=True)
class Quote:
    source: str
    title: str
    text: str
    start: int
    end: int


@dataclass(frozen=True)
class Asking:
    """A question, what the model said where there is one, and the quotes that bear it."""

    question: str
    answer: str | None
    quotes: tuple[Quote, ...]

    def lines(self) -> list[str]:
        found = [f"? {self.question}"]
        found += [f"  {printable(self.answer)}"] if self.answer else []
        for quote in self.quotes:
            said = " ".join(printable(quote.text).split())
            said = said if len(said) <= MOST_CHARS else f"{said[:MOST_CHARS]}…"
            found += [
                f"  “{said}”",
                f"    {printable(quote.title)}, {printable(quote.source)}:{quote.start}-{quote.end}",
            ]
        return found


def build_base(folder: Path | None, out: Path, progress: Progress, vectors: bool = True) -> tuple[Built, bool]:
    """The base below `out`, and whether it has vectors: where MiniLM is installed."""
    source = folder
    if source is None:
        source = out / "python"
        write_python_documents(source)
    elif not source.exists():
        raise UserError(source, "there is no such folder", "Name one with texts in it.")
    embed: Path | None = None
    if vectors:
        try:
            embed = find_minilm()
        except UserError:
            embed = None
    return build([source], out / "kb", asked=Asked(embed=embed), progress=progress), embed is not None


def model_directory(given: Path | None, out: Path, progress: Any = None) -> Path | None:
    """The model that answers: the one that was named, or SmolLM2 where its wheel is installed."""
    if given is not None:
        return given
    directory = out / "smollm2"
    if directory.exists():
        return directory
    try:
        convert_model("smollm2", directory, progress=progress)
    except UserError:
        return None
    return directory


def ask_all(base: KnowledgeBase, questions: Sequence[str], writer: Writer | None) -> list[Asking]:
    found = []
    for question in questions:
        answer = None if writer is None else Answerer(base, writer).answer(question)
        if answer is not None and not answer.abstained:
            cited = tuple(Quote(one.source, one.title, one.quote, one.start, one.end) for one in answer.citations)
            borne = dict.fromkeys(
                str(one) for one in answer.statements if one.supported
            )  # small models repeat themselves
            found.append(Asking(question, " ".join(borne), cited))
            continue
        nearest = [
            Quote(passage.chunk.source, passage.chunk.title, text, start, end)
            for passage, text, start, end in quotes(question, base.search(question), 2)
        ]
        found.append(Asking(question, None if answer is None else answer.text, tuple(nearest)))
    return found
