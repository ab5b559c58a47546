"""Markdown and reStructuredText: the text as it stands, with its headings."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from moesaic.know.documents.document import Document, Heading, Raw
from moesaic.know.documents.plain import decoded

_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")
_HASHES = re.compile(r" {0,3}(#{1,6})[ \t]")
_UNDERLINE = re.compile(r" {0,3}(=+|-+)[ \t]*$")
_RST_UNDERLINE = re.compile(r"([=\-~^\"'`#*+.:_])\1{2,}[ \t]*$")


def read(raw: Raw) -> list[Document]:
    text = decoded(raw.bytes)
    return [titled(raw, text, markdown_headings(text))]


def read_rst(raw: Raw) -> list[Document]:
    text = decoded(raw.bytes)
    return [titled(raw, text, _rst_headings(text))]


def titled(raw: Raw, text: str, headings: Iterable[Heading], title: str | None = None) -> Document:
    """Named after its first outermost heading, where nothing else names it."""
    found = tuple(headings)
    outermost = min((heading.level for heading in found), default=0)
    first = next((heading.title for heading in found if heading.level == outermost), raw.name)
    return Document(raw.source, title or first, text, found)


def _lines(text: str) -> Iterator[tuple[int, str]]:
    start = 0
    for line in text.split("\n"):
        yield start, line
        start += len(line) + 1


def markdown_headings(text: str) -> Iterator[Heading]:
    fence = ""
    above, above_start = "", 0  # the line before, where it may be underlined to be a heading
    for start, line in _lines(text):
        mark = _FENCE.match(line)
        if fence:
            if mark and mark[1].startswith(fence) and not line.strip(" \t`~"):
                fence = ""
            continue
        if mark:
            fence, above = mark[1], ""
        elif found := _HASHES.match(line):
            if title := _without_hashes(line[found.end() :].strip()):
                yield Heading(start, start + len(line), len(found[1]), title)
            above = ""
        elif above.strip() and (found := _UNDERLINE.match(line)):
            yield Heading(above_start, start + len(line), 1 if found[1][0] == "=" else 2, above.strip())
            above = ""
        else:
            paragraph = bool(above.strip())
            starts_other = line.startswith(("    ", "\t", ">", "|")) or re.match(r"\s*([-*+]|\d+[.)])\s", line)
            # Only a paragraph of one line can be underlined here; longer ones are prose above a rule or a table.
            above, above_start = ("", 0) if paragraph or starts_other else (line, start)


def _without_hashes(title: str) -> str:
    """A heading may be closed with as many as it likes, after a space."""
    left = title.rstrip("#")
    return left.rstrip() if left != left.rstrip() or not left else title


def _rst_headings(text: str) -> Iterator[Heading]:
    """Levels in the order in which their marks first appear, as docutils has it."""
    levels: list[str] = []
    lines = list(_lines(text))
    for number, (start, line) in enumerate(lines[1:], 1):
        before_start, before = lines[number - 1]
        mark = _RST_UNDERLINE.match(line)
        if not mark or not before.strip() or before[0].isspace() or _RST_UNDERLINE.match(before):
            continue
        if len(line.rstrip()) < len(before.rstrip()):
            continue
        over = lines[number - 2][1] if number > 1 else ""
        kind = mark[1] * 2 if over.rstrip() == line.rstrip() else mark[1]
        if kind not in levels:
            levels.append(kind)
        first = lines[number - 2][0] if len(kind) == 2 else before_start
        yield Heading(first, start + len(line), levels.index(kind) + 1, before.strip())
