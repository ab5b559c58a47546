"""Citations of an answer, each checked against its passage: kept with a quote, moved to where it stands, or dropped.

check_answer("Ada wrote programs [1]. She lived in Rome [2].", passages)
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from moesaic.know.answer.choose import Passage
from moesaic.know.answer.claims import Lexicon
from moesaic.know.answer.sentences import sentences
from moesaic.know.answer.support import Source, Verdict
from moesaic.know.chunk import Chunk

MARKS = re.compile(r"\s*\[\s*(\d{1,4}(?:\s*[,;]\s*\d{1,4})*)\s*\]")
# A full stop goes behind the marks that follow it, so that a sentence has its own.
STOP_FIRST = re.compile(r"([.!?])((?:\s*\[\s*\d[\d\s,;]*\])+)")


@dataclass(frozen=True)
class Citation:
    number: int  # of the passage
    source: str
    title: str
    chunk: str  # its id
    document: str
    quote: str
    start: int  # of the quote in the document
    end: int


@dataclass(frozen=True)
class Dropped:
    number: int | None  # of the passage that was cited; none was
    statement: str
    reason: str
    moved_to: int | None = None


@dataclass(frozen=True)
class Statement:
    text: str
    citations: tuple[Citation, ...]
    dropped: tuple[Dropped, ...] = ()

    @property
    def supported(self) -> bool:
        return bool(self.citations)

    def __str__(self) -> str:
        marks = "".join(f"[{citation.number}]" for citation in self.citations)
        ending = self.text[-1] if self.text[-1:] in ".!?" else ""
        return f"{self.text.removesuffix(ending)} {marks}{ending}" if marks else f"{self.text} [unsupported]"


def read_statements(text: str) -> list[tuple[str, list[int]]]:
    """Sentences of an answer and the numbers that each cites. Sentences without any, before one with some in the same
    breath ("... . ... [1]."), are cited with it."""
    text = STOP_FIRST.sub(lambda found: found[2] + found[1], text)
    found: list[tuple[str, list[int]]] = []
    for sentence in sentences(text):
        numbers = [int(n) for marks in MARKS.finditer(sentence) for n in re.findall(r"\d+", marks[1])]
        plain = " ".join(MARKS.sub("", sentence).split())
        if plain.strip(" .!?-*"):
            found.append((plain, list(dict.fromkeys(numbers))))
    return found


def check_answer(text: str, passages: Sequence[Passage], lexicon: Lexicon | None = None) -> list[Statement]:
    checker = Checker(passages, lexicon)
    return [checker.check(statement, numbers) for statement, numbers in read_statements(text)]


class Checker:
    """Statements against the passages that were shown. The whole chunk counts, also what was not shown of it."""

    def __init__(self, passages: Sequence[Passage], lexicon: Lexicon | None = None) -> None:
        self.passages = {passage.number: passage for passage in passages}
        lexicon = lexicon or Lexicon.of(passage.chunk.text for passage in passages)
        self.sources = {n: source_of(p.chunk, lexicon) for n, p in self.passages.items()}
        self.lexicon = lexicon

    def check(self, statement: str, cited: Sequence[int]) -> Statement:
        verdicts = {number: self.sources[number].check(statement) for number in cited if number in self.sources}
        dropped = [Dropped(n, statement, "there is no such passage") for n in cited if n not in self.sources]
        kept = [n for n, verdict in verdicts.items() if verdict.supported]
        if not kept and len(verdicts) > 1 and (together := self._together(statement, list(verdicts))):
            return Statement(statement, together, tuple(dropped))
        moved = None if kept else self._elsewhere(statement, set(verdicts))
        dropped += [
            Dropped(n, statement, "; ".join(verdict.reasons), moved)
            for n, verdict in verdicts.items()
            if not verdict.supported
        ]
        if moved is not None:
            verdicts[moved] = self.sources[moved].check(statement)
            kept = [moved]
        if not kept and not cited:
            dropped.append(Dropped(None, statement, "no passage supports it"))
        citations = (self._citation(number, verdicts[number]) for number in kept)
        return Statement(statement, tuple(c for c in citations if c is not None), tuple(dropped))

    def _elsewhere(self, statement: str, tried: set[int]) -> int | None:
        """The passage that supports it best."""
        found = {n: source.check(statement) for n, source in self.sources.items() if n not in tried}
        fitting = [n for n, verdict in found.items() if verdict.supported]
        return max(fitting, key=lambda n: (found[n].score, found[n].words, -n), default=None)

    def _together(self, statement: str, numbers: list[int]) -> tuple[Citation, ...]:
        """Several passages may support a statement that none of them supports alone."""
        sources = [self.sources[number] for number in numbers]
        verdict = Source.joined(sources).check(statement)
        if not verdict.supported:
            return ()
        citations, first = [], 0
        for number, source in zip(numbers, sources, strict=True):
            own = [(a - first, b - first) for a, b in verdict.spans if first <= a < first + len(source.text)]
            found = self._citation(number, Verdict(True, verdict.score, spans=tuple(own)))
            citations += [found] if found is not None else []
            first += len(source.text)
        return tuple(citations)

    def _citation(self, number: int, verdict: Verdict) -> Citation | None:
        chunk = self.passages[number].chunk
        if verdict.quote is None:
            return None
        start, end = verdict.quote
        quote = chunk.text[start:end]
        begin = chunk.start + start
        return Citation(number, chunk.source, chunk.title, chunk.id, chunk.document, quote, begin, begin + len(quote))


def source_of(chunk: Chunk, lexicon: Lexicon) -> Source:
    return Source(chunk.title, chunk.text, lexicon, chunk.headings)
