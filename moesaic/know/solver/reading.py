"""Reads one fact in sentences by plain patterns, without a model: "the R of S is X", and some relations' own words.

A pattern is tried only where the sentence has the name that is known, so a look-up costs a few sentences.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache

VALUE = r"(?P<x>[^.;,()]+?(?: [A-Z]\.)?[^.;,()]*?)"
MOST_WORDS = 6  # of what is read: a clause is not a name
# {r} is the relation, {s} its subject and {x} its object, one of the two known.
ANY_RELATION = (
    "the {r}(?: of birth| city| year)? of {s} (?:is|was) (?:in |on )?{x}", "{x} (?:is|was) the {r} of {s}",
    "{s}'s? {r} (?:is|was) {x}", "{s} has an? {r} of {x}", "{s} has {x} {r}",
    "{s} (?:was|were|is) {r} (?:in|on|by) {x}", "the number of {r} of {s} is {x}",
)  # fmt: skip
IN_OTHER_WORDS: dict[str, tuple[str, ...]] = {
    "author": ("{s} (?:was|is) written by {x}", "{x} wrote {s}"),
    "birthplace": ("{s} was born in {x}", "{x} is where {s} was born"),
    "born": ("{s} was born (?:on|in) {x}", "the birth of {s} was on {x}"),
    "capital": ("{s} is governed from {x}",),
    "country": ("{s} is an? (?:city|town|village|place) in {x}", "{s} lies in {x}"),
    "director": ("{s} (?:was|is) directed by {x}", "{x} directed {s}"),
    "employer": ("{s} works (?:for|at) {x}", "{s} is employed by {x}"),
    "founder": ("{s} was founded by {x}", "{x} (?:founded|started) {s}"),
    "headquarters": ("{s} is (?:based|headquartered) in {x}", "{s} has its main office in {x}"),
    "population": ("{x} people live in {s}",),
    "spouse": ("{s} is married to {x}", "{s} and {x} are married", "{s} married {x}"),
    "teacher": ("{s} was taught by {x}", "{x} (?:taught|was the one who taught) {s}"),
}
DATED = frozenset(("born", "died", "founded", "published", "released", "built"))  # "born in Morva" tells no date
WHEN = re.compile(r" (?:on|in) (?=\d)")  # "in Morva on 2 May 1950" tells where, and then when
SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z\"“])|\n+")


@lru_cache(4096)
def patterns(relation: str, known: str, forward: bool) -> tuple[re.Pattern[str], ...]:
    forms = (*ANY_RELATION, *IN_OTHER_WORDS.get(relation, ()))
    name, said = re.escape(known), re.escape(relation)
    s, x = (name, VALUE) if forward else (VALUE, name)
    return tuple(re.compile(form.format(r=said, s=s, x=x) + r"[.!]?", re.I) for form in forms)


def read_fact(relation: str, known: str, text: str, forward: bool) -> Iterator[tuple[str, str]]:
    """Values and the sentences they stand in: objects, or subjects where the object is known."""
    for sentence in SENTENCE.split(text):
        if known.lower() not in sentence.lower():
            continue
        for pattern in patterns(relation.lower(), known, forward):
            match = pattern.fullmatch(sentence.strip())
            value = WHEN.split(match["x"].strip(), maxsplit=1)[0] if match else ""
            if forward and relation.lower() in DATED and not re.search(r"\d", value):
                continue
            if value and len(value.split()) <= MOST_WORDS and value.lower() not in ("it", "he", "she", "they"):
                yield value, sentence.strip()
                break
