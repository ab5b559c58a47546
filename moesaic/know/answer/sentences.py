"""Sentences of a text, as spans of it, so that what is quoted can be found again."""

from __future__ import annotations

import re

ENDS = re.compile(r"[.!?…。！？]+[\"'”’)\]»]*(?=\s|$)|[。！？]+|\n\s*\n|\n(?=\s*(?:[-*•#|]|\d+[.)]\s))")
# After these a full stop ends no sentence.
LISTED = """
mr mrs ms dr prof st sr jr vs etc no vol fig eq gen col lt sgt capt cmdr adm rev hon gov sen rep pres inc ltd
co corp bros dept univ approx ca cf al ed eds est jan feb mar apr jun jul aug sep sept oct nov dec mt ft op pp
ph.d e.g i.e a.m p.m b.c a.d u.s u.k d.c r c b d fl"""
ABBREVIATIONS = frozenset(LISTED.split())
OPENING = re.compile(r"[\"'“‘(\[«]*[A-Z0-9À-ÞЀ-Я]|[^\x00-\x7f]|[-*•#|\"'“‘(\[«]")


def sentence_spans(text: str) -> list[tuple[int, int]]:
    """(start, end) of each sentence, without the white space around it."""
    spans: list[tuple[int, int]] = []
    start = 0
    for end in ENDS.finditer(text):
        if end[0].strip() and not _ends(text, end):
            continue
        _add(spans, text, start, end.end())
        start = end.end()
    _add(spans, text, start, len(text))
    return spans


def sentences(text: str) -> list[str]:
    return [text[start:end] for start, end in sentence_spans(text)]


def _add(spans: list[tuple[int, int]], text: str, start: int, end: int) -> None:
    piece = text[start:end]
    if stripped := piece.strip():
        begin = start + len(piece) - len(piece.lstrip())
        spans.append((begin, begin + len(stripped)))


def _ends(text: str, end: re.Match[str]) -> bool:
    """Whether a mark ends a sentence: not after an abbreviation or an initial, and a new one begins as one does."""
    after = text[end.end() : end.end() + 8].lstrip()
    if not after or end[0][0] != ".":
        return True
    before = re.search(r"[\w.]+$", text[max(0, end.start() - 12) : end.start()])
    word = before[0].casefold() if before else ""
    if word in ABBREVIATIONS or (len(word) == 1 and word.isalpha()):
        return False
    return OPENING.match(after) is not None
