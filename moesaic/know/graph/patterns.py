"""Entities and triples of chunks by patterns and co-occurrence, without a model: about a second per megabyte.

A relation is read from what stands between two names of a sentence: "X is a Y", "X, the Y of Z", "born in", a verb
with its preposition; where nothing is understood, two names side by side are related by `with`. Sentences that begin
with a pronoun speak of what the document is about.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from moesaic.know.chunk import Chunk
from moesaic.know.graph.alignment import WithinDocument, acronyms_in, merged
from moesaic.know.graph.names import FUNCTION_WORDS, PRONOUNS, Mention, han_terms, key, parts, scan, without_parentheses
from moesaic.know.graph.triple import ALSO_CALLED, WITH, Extraction

IS_A = re.compile(
    r"^[\s)\"”]*(?:\([^()]*\)|,[^,]{0,80},)?\s*(?:is|was|are|were)\s(?:a|an|the|one\sof\sthe)\s(?P<what>[^,.;()\n]{3,120})"
)
THE_OF = re.compile(r"^,?\s(?:the|a|an)\s(?P<role>[a-z][\w\s-]{2,40}?)\s(?P<of>of|in|at|for)\s(?:the\s)?$")
BORN = re.compile(r"\b(?P<what>born|died|founded|established|built|released|published)\b[^.;]{0,40}?$")
# A noun phrase ends before these.
PHRASE_END = re.compile(
    r"\s(?:of|in|at|on|from|by|for|with|to|who|whom|whose|which|that|where|and|or|is|was|are|were|has|had|\w+ed\s(?:by|in|as|for|to)|"
    r"located|based|best|known|directed|written|produced|published|founded|starring|born)\b"
)
WORDS = re.compile(r"[a-z][a-z'-]*")
_PREPOSITIONS = "of in at on from by for with to as into under over between against near after before"
# Verbs that do not end in -ed.
_VERBS = "born wrote written built won made led held known met began became sold sung sang shot taught bought found"
VERBS = frozenset(_VERBS.split())
PREPOSITIONS = frozenset(_PREPOSITIONS.split())
MAX_BETWEEN = 60  # characters between two names that are still related by their words
MAX_PAIRS = 8  # with one subject in a sentence


class PatternExtractor:
    @property
    def settings(self) -> Mapping[str, Any]:
        return {"extract": "patterns", "version": 1}

    def extract(self, chunks: Sequence[Chunk]) -> list[Extraction]:
        found: list[Extraction] = []
        for _, same in groupby(chunks, key=lambda chunk: chunk.document):
            together = list(same)
            known = WithinDocument(dict.fromkeys(chunk.title for chunk in together if chunk.title))
            found += [extraction(chunk, known) for chunk in together]
        return found


def extraction(chunk: Chunk, known: WithinDocument) -> Extraction:
    names: Counter[str] = Counter()
    triples: dict[tuple[str, str, str], None] = {}  # in the order they are read, each once
    about = without_parentheses(chunk.title) or chunk.title
    if about != chunk.title:
        triples[(chunk.title, ALSO_CALLED, about)] = None
    for short, long in acronyms_in(chunk.text).items():
        triples[(short, ALSO_CALLED, known.meet(long))] = None
    for sentence, start, end in sentences(chunk.text):
        named = []
        for mention in sentence:
            if mention.kind == "number" or not key(mention.text):
                continue
            if mention.kind == "name" and _begins(mention, start, chunk.text) and _common(mention.text, chunk.text):
                continue
            full = known.meet(mention.text) if mention.kind == "name" else mention.text
            named.append((mention, full))
            names[full] += 1
            for part in parts(full):
                names[part] += 1
        for triple in _triples(chunk.text[start:end], start, named, about):
            triples[triple] = None
    for term in han_terms(chunk.text):
        names[term] += 1
    titles = tuple(dict.fromkeys(filter(None, (chunk.title, about, *chunk.headings[-1:]))))
    return Extraction(merged(names), tuple(triples), titles)


def sentences(text: str) -> Iterator[tuple[list[Mention], int, int]]:
    """The mentions of each sentence, and where it starts and ends."""
    start = 0
    found: list[Mention] = []
    for mention in scan(text):
        if mention.kind == "end":
            yield found, start, mention.end
            start, found = mention.end, []
        else:
            found.append(mention)
    if found or text[start:].strip():
        yield found, start, len(text)


def _begins(mention: Mention, start: int, text: str) -> bool:
    return not text[start : mention.start].strip(" \n\t\"“'(-*#")


def _common(word: str, text: str) -> bool:
    """Whether a single capitalised word at the start of a sentence is an ordinary word, written small elsewhere."""
    return (
        " " not in word
        and word[1:].islower()
        and re.search(rf"(?<![\w-]){re.escape(word.lower())}\b", text) is not None
    )


def _triples(sentence: str, start: int, named: list[tuple[Mention, str]], about: str) -> Iterator[tuple[str, str, str]]:
    first = WORDS.search(sentence.lower())
    subject = (
        about
        if first and first[0] in PRONOUNS and sentence.lstrip()[: first.end()].lower().startswith(first[0])
        else ""
    )
    if named and not subject and _begins(named[0][0], 0, sentence[: max(0, named[0][0].start - start)] or " "):
        subject = named[0][1]
    after = 0
    if subject and named and subject == named[0][1]:
        after = named[0][0].end - start
    elif first:
        after = first.end()
    if subject and (what := IS_A.match(sentence[after:])):
        phrase = PHRASE_END.split(what["what"], maxsplit=1)[0].strip(' "“”')
        if phrase and len(phrase) < 60:
            yield subject, "is a", phrase
    pairs = 0
    for number, (mention, name) in enumerate(named):
        before = named[number - 1] if number else None
        begin = before[0].end - start if before else after
        between = sentence[begin : mention.start - start]
        source = before[1] if before and before[0].kind != "date" else subject
        if mention.kind == "date":
            if subject and (born := BORN.search(sentence[: mention.start - start])):
                yield subject, born["what"], name
            continue
        if not source or source == name or pairs >= MAX_PAIRS:
            continue
        relation = _relation(between)
        verb = relation and relation.split(" ")[-1] in PREPOSITIONS and len(relation.split(" ")) > 1
        if before and subject and verb and subject != name:  # "X, born in Y, was directed by Z" speaks of X
            yield subject, relation, name
        else:
            yield source, relation or WITH, name
        pairs += 1


def _relation(between: str) -> str:
    """Of the words between two names, those that say the relation: the last verb and what follows it."""
    if not 0 < len(between) <= MAX_BETWEEN:
        return ""
    if role := THE_OF.match(between):
        return f"{role['role']} {role['of']}"
    words = [word for word in WORDS.findall(between.lower()) if word not in ("the", "a", "an")]
    content = [at for at, word in enumerate(words) if word not in FUNCTION_WORDS]
    if not content:
        return " ".join(words) if words and words[-1] in PREPOSITIONS else ""
    verbs = [at for at in content if words[at].endswith("ed") or words[at] in VERBS]
    return " ".join(words[(verbs or content)[-1] :][:4])
