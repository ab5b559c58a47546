"""Semantic anchors (Nie et al.): the names and relations that a question mentions, found before a program is written.

    finder = Anchors(facts.names, facts.relations, Lexicon.learn(pairs))
    found = finder.find("Where was the teacher of Ada Lind born?")      # [Ada Lind] <teacher> <birthplace>
    grammar(found.names, found.relations)                               # programs over these, and no others

Names are found by their words. How a relation is spoken of ("works for", "pays") is learned from pairs of a question
and its program: word sequences that come with a relation more often than not.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from moesaic.know.language.parse import TOKEN, parse, unbracketed
from moesaic.know.language.program import bracketed

WORD = re.compile(r"\w+|[^\w\s]")
LONGEST = 3  # words of a sequence that stands for a relation
LEAST, SURE = 3, 0.55  # times that a sequence was seen, and with the relation


@dataclass(frozen=True)
class Found:
    """In the order of the question."""

    names: tuple[str, ...]
    relations: tuple[str, ...]

    def __str__(self) -> str:
        names = [bracketed(name, "[", "]") for name in self.names]
        return " ".join([*names, *(bracketed(name, "<", ">") for name in self.relations)])


def anchors_of(program: str) -> Found:
    """Those of a program, in its order: what a model is taught to find."""
    parse(program)
    tokens = [match for match in TOKEN.finditer(program) if match.lastgroup in ("name", "relation")]
    by_kind = {kind: [unbracketed(t[kind]) for t in tokens if t.lastgroup == kind] for kind in ("name", "relation")}
    return Found(tuple(dict.fromkeys(by_kind["name"])), tuple(dict.fromkeys(by_kind["relation"])))


class Names:
    """Names of a graph, found in texts: the longest at each place, whole words, whatever their case."""

    def __init__(self, names: Iterable[str]) -> None:
        self.by_first: dict[str, list[tuple[list[str], str]]] = {}
        for name in sorted(names):
            words = [word.lower() for word in WORD.findall(name)]
            if words:
                self.by_first.setdefault(words[0], []).append((words, name))
        for known in self.by_first.values():
            known.sort(key=lambda entry: -len(entry[0]))

    def places(self, text: str) -> list[tuple[int, int, str]]:
        """Start and end in the text, and the name, in order."""
        words = list(WORD.finditer(text))
        lower = [word[0].lower() for word in words]
        found, at = [], 0
        while at < len(words):
            for known, name in self.by_first.get(lower[at], ()):
                if lower[at : at + len(known)] == known:
                    found.append((words[at].start(), words[at + len(known) - 1].end(), name))
                    at += len(known)
                    break
            else:
                at += 1
        return found

    def without(self, text: str, sign: str = "#") -> str:
        """The text with a sign in the place of each name."""
        for start, end, _ in reversed(self.places(text)):
            text = f"{text[:start]}{sign}{text[end:]}"
        return text


class Lexicon:
    """Word sequences that stand for relations."""

    def __init__(self, sequences: dict[tuple[str, ...], tuple[str, ...]]) -> None:
        self.sequences = sequences

    @classmethod
    def learn(cls, pairs: Iterable[tuple[str, str]]) -> Lexicon:
        """Of questions, without names, and their programs."""
        seen: Counter[tuple[str, ...]] = Counter()
        together: Counter[tuple[tuple[str, ...], str]] = Counter()
        for question, program in pairs:
            relations = anchors_of(program).relations
            for sequence in set(sequences(question)):
                seen[sequence] += 1
                together.update((sequence, relation) for relation in relations)
        found: dict[tuple[str, ...], list[str]] = {}
        for (sequence, relation), count in together.items():
            if seen[sequence] >= LEAST and count >= SURE * seen[sequence]:
                found.setdefault(sequence, []).append(relation)
        return cls({sequence: tuple(sorted(relations)) for sequence, relations in found.items()})

    def relations(self, question: str) -> list[str]:
        return [relation for sequence in sequences(question) for relation in self.sequences.get(sequence, ())]


class Anchors:
    """Finds the anchors of questions in one graph. Without a lexicon a relation is found by its own words."""

    def __init__(self, names: Iterable[str], relations: Iterable[str], lexicon: Lexicon | None = None) -> None:
        self.names, self.relations, self.lexicon = Names(names), sorted(relations), lexicon
        self.by_words = Names(self.relations)

    def find(self, question: str) -> Found:
        names = dict.fromkeys(name for _, _, name in self.names.places(question))
        bare = self.names.without(question)
        said = [name for _, _, name in self.by_words.places(bare)]
        said += self.lexicon.relations(bare) if self.lexicon is not None else []
        return Found(tuple(names), tuple(name for name in dict.fromkeys(said) if name in self.relations))


def sequences(text: str) -> list[tuple[str, ...]]:
    words: Sequence[str] = [word.lower() for word in WORD.findall(text)]
    return [
        tuple(words[start : start + length])
        for start in range(len(words))
        for length in range(1, LONGEST + 1)
        if start + length <= len(words)
    ]
