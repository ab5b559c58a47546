"""Cut a document into chunks that can be quoted: whole paragraphs, else whole sentences, each with where it stands.

`document.text[chunk.start:chunk.end] == chunk.text` for every chunk, chunks do not overlap, and what no chunk holds is
white space. A section begins a chunk of its own, unless nothing but headings stands before it.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator

from moesaic.know.chunk import Chunk
from moesaic.know.documents.document import Document

TARGET = 1000  # characters: some 200 to 250 tokens of English, which small embedding models read whole
_PARAGRAPH = re.compile(r"\n[ \t]*\n\s*")
# A sentence ends at its mark, with the quotes and brackets that close there, before white space; a line of a list or a
# table ends at its end. Chinese and Japanese marks need no white space.
_SENTENCE = re.compile(r"(?<=[.!?…])[\"'”’)\]]*\s+|(?<=[。！？；])[”’」』）]*\s*|\n")
_ABBREVIATION = re.compile(r"(?:\b(?:[A-Z]|Mr|Mrs|Ms|Dr|Prof|St|Sr|Jr|vs|e\.g|i\.e|cf|Fig|No|Vol|pp|approx))\.$")
_SPACE = re.compile(r"\s+")

Span = tuple[int, int]


def chunks_of(document: Document, target: int = TARGET) -> list[Chunk]:
    """Chunks of at most `target` characters, but for the end of a section that is too short to stand alone."""
    chunks = []
    for (start, end), headings in _sections(document):
        for first, last in _packed(document.text, start, end, target):
            page = bisect_right(document.pages, first) or None
            chunk = Chunk(
                f"{document.id}-{first:x}", document.id, document.source, document.title,
                document.text[first:last], first, last, headings, page,
            )  # fmt: skip
            chunks.append(chunk)
    return chunks


def _sections(document: Document) -> Iterator[tuple[Span, tuple[str, ...]]]:
    """Places of the sections, each with the headings above its text, its own among them."""
    path: list[tuple[int, str]] = []
    start, body = 0, 0  # of the section; of what follows its headings
    for heading in document.headings:
        if document.text[body : heading.start].strip():
            yield (start, heading.start), tuple(title for _, title in path)
            start = heading.start
        body = heading.end
        path = [(level, title) for level, title in path if level < heading.level] + [(heading.level, heading.title)]
    yield (start, len(document.text)), tuple(title for _, title in path)


def _packed(text: str, start: int, end: int, target: int) -> list[Span]:
    """As many pieces in each chunk as fit; a last one that would be short joins the one before."""
    packed: list[Span] = []
    for first, last in _pieces(text, start, end, target):
        if packed and last - packed[-1][0] <= target:
            packed[-1] = packed[-1][0], last
        else:
            packed.append((first, last))
    short = target // 5
    if len(packed) > 1 and packed[-1][1] - packed[-1][0] < short and packed[-1][1] - packed[-2][0] <= target + short:
        packed[-2:] = [(packed[-2][0], packed[-1][1])]
    return packed


def _pieces(text: str, start: int, end: int, target: int) -> Iterator[Span]:
    """Paragraphs; of those longer than `target`, sentences; of those longer still, words; and at last, characters."""
    for paragraph in _split(text, start, end, _PARAGRAPH):
        if paragraph[1] - paragraph[0] <= target:
            yield paragraph
            continue
        for sentence in _sentences(text, *paragraph):
            if sentence[1] - sentence[0] <= target:
                yield sentence
            else:
                yield from _cut(text, *sentence, target)


def _sentences(text: str, start: int, end: int) -> Iterator[Span]:
    first = start
    for _, last in _split(text, start, end, _SENTENCE):
        if last < end and _ABBREVIATION.search(text, max(first, last - 8), last):
            continue
        yield first, last
        first = _after_space(text, last, end)


def _after_space(text: str, position: int, end: int) -> int:
    space = _SPACE.match(text, position, end)
    return space.end() if space else position


def _split(text: str, start: int, end: int, separator: re.Pattern[str]) -> Iterator[Span]:
    """Spans between separators, without white space at their ends; what closes a sentence belongs to it."""
    position = start
    for found in separator.finditer(text, start, end):
        closing = len(found[0].rstrip())
        yield from _stripped(text, position, found.start() + closing)
        position = found.end()
    yield from _stripped(text, position, end)


def _stripped(text: str, start: int, end: int) -> Iterator[Span]:
    while start < end and text[start].isspace():
        start += 1
    while end > start and text[end - 1].isspace():
        end -= 1
    if start < end:
        yield start, end


def _cut(text: str, start: int, end: int, target: int) -> Iterator[Span]:
    while end - start > target:
        space = max(text.rfind(" ", start + 1, start + target), text.rfind("\n", start + 1, start + target))
        cut = space if space > start + target // 2 else start + target
        yield from _stripped(text, start, cut)
        start = cut
    yield from _stripped(text, start, end)
