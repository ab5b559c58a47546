"""What an answer cites: numbers in brackets, and the sentence of the passage that comes nearest to what is said."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from moesaic.serve.api.knowledge import Citation, Passage

MARK = re.compile(r"\[(\d{1,3}(?:\s*,\s*\d{1,3})*)\]")
NUMBER = re.compile(r"\d+")
WORD = re.compile(r"\w+")
SENTENCE = re.compile(r"[^.!?\n]+(?:[.!?]+|\n|$)")
MOST = 200  # citations of one answer; a model in a loop writes thousands


def marks(answer: str, count: int) -> Iterator[tuple[int, int, int]]:
    """The number of each passage that is named, and where in the answer: all of `[1, 2]`, or of `[1]`. Numbers of no
    passage are none."""
    found = 0
    for mark in MARK.finditer(answer):
        for number in NUMBER.findall(mark[1]):
            if 1 <= int(number) <= count and found < MOST:
                found += 1
                yield int(number), mark.start(), mark.end()


def statement(answer: str, mark: int) -> str:
    """What stands before a mark: the sentence it ends, without other marks."""
    before = answer[:mark].rstrip()
    ends = [place.end() for place in re.finditer(r"[.!?]\s|\n", before)]
    return MARK.sub(" ", before[ends[-1] if ends else 0 :]).strip()


def nearest_sentence(said: str, text: str) -> tuple[int, int]:
    """Where in the text the sentence stands that shares most words with what is said."""
    words = set(WORD.findall(said.lower()))
    best, place = -1.0, (0, len(text))
    for found in SENTENCE.finditer(text):
        its = WORD.findall(found[0].lower())
        if not its:
            continue
        shared = sum(word in words for word in set(its)) / (8 + len(set(its))) ** 0.5
        if shared > best:
            best, place = shared, found.span()
    start, end = place
    while start < end and text[start].isspace():
        start += 1
    while end > start and text[end - 1].isspace():
        end -= 1
    return start, end


def cited(answer: str, passages: Sequence[Passage]) -> list[Citation]:
    """The citations, which nobody checks here."""
    found = []
    for number, start, end in marks(answer, len(passages)):
        passage = passages[number - 1]
        first, last = nearest_sentence(statement(answer, start), passage.text)
        quote = passage.text[first:last]
        found.append(Citation(number, start, end, quote, passage.start + first, passage.start + last))
    return found
