"""The things of a multi-hop world and what is true of them: invented names, and facts as triples, from a seed.

A word of a name belongs to the training or to the test worlds by its hash, so the two share no names and no parts of
names.
"""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Literal

from moesaic.data.tasks.multihop_texts import GENRES, RELATIONS

Split = Literal["train", "test"]
Triple = tuple[str, str, str]
ONSETS = ("b", "d", "f", "g", "h", "k", "l", "m", "n", "p", "r", "s", "t", "v", "z", "br", "dr", "kr", "st", "tr")
VOWELS = ("a", "e", "i", "o", "u", "ai", "ea", "io")
ENDS = ("", "", "l", "n", "r", "s", "th", "m")
COMPANY = ("Works", "Press", "Mills", "Trading", "Instruments", "Glass")
WORK = ("The Song of {}", "{} in Winter", "Letters from {}", "The Garden of {}", "A Year in {}", "The Clock of {}")
FIRST_YEAR, LAST_YEAR = 1850, 1999


@dataclass
class Facts:
    """Names by kind; `objects[s, r]` and `subjects[r, o]` are what the triples say; there is one object at most."""

    things: dict[str, list[str]] = field(default_factory=dict)
    triples: list[Triple] = field(default_factory=list)
    objects: dict[tuple[str, str], str] = field(default_factory=dict)
    subjects: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    aside: set[str] = field(default_factory=set)  # those that no question begins with

    def add(self, subject: str, relation: str, object: str) -> None:
        assert (subject, relation) not in self.objects
        self.triples.append((subject, relation, object))
        self.objects[subject, relation] = object
        self.subjects.setdefault((relation, object), []).append(subject)

    def kind(self, name: str) -> str:
        return next(kind for kind, names in self.things.items() if name in names)


class Names:
    """Pronounceable words of a split, each given once."""

    def __init__(self, random: Random, split: Split, short: bool = False) -> None:
        self.random, self.split = random, split
        self.sounds = (ONSETS[:15], VOWELS[:5], ("",)) if short else (ONSETS, VOWELS, ENDS)
        self.taken: set[str] = set()

    def word(self) -> str:
        onsets, vowels, ends = self.sounds
        while True:
            syllables = [self.random.choice(onsets) + self.random.choice(vowels) for _ in range(2)]
            word = ("".join(syllables) + self.random.choice(ends)).capitalize()
            if word not in self.taken and split_of(word) == self.split:
                self.taken.add(word)
                return word


def split_of(word: str) -> Split:
    return "test" if hashlib.blake2b(word.lower().encode(), digest_size=1).digest()[0] % 4 == 0 else "train"


def make_facts(
    random: Random,
    split: Split,
    people: int,
    namesakes: int,
    years_only: bool,
    relations: Sequence[str] = (),
    short_names: bool = False,
) -> Facts:
    """`namesakes` more people share a last name with one of the `people`; nobody asks about them, and they count.
    `relations`: of these only; `short_names`: every name is one word of four letters."""
    facts, names = Facts(), Names(random, split, short_names)

    def person() -> str:
        return names.word() if short_names else f"{names.word()} {names.word()}"

    def company() -> str:
        return names.word() if short_names else f"{names.word()} {random.choice(COMPANY)}"

    def work() -> str:
        return names.word() if short_names else random.choice(WORK).format(names.word())

    known = [person() for _ in range(people)]
    others = [f"{names.word()} {random.choice(known).split()[-1]}" for _ in range(namesakes)]
    things = facts.things
    things["person"] = known + others
    facts.aside.update(others)
    things["country"] = [names.word() for _ in range(max(2, people // 6))]
    things["city"] = [names.word() for _ in range(max(3, people // 3, len(things["country"])))]
    things["company"] = [company() for _ in range(max(2, people // 4))]
    things["work"] = [work() for _ in range(max(3, people // 2))]
    things["genre"] = list(GENRES)
    for name, relation in RELATIONS.items():
        if name == "capital" or (relations and name not in relations):
            continue
        for subject in things[relation.subject]:
            if (subject, name) in facts.objects or random.random() < relation.missing:
                continue
            found = _object(random, facts, subject, name, years_only)
            if found is not None:
                facts.add(subject, name, found)
                if name == "spouse":
                    facts.add(found, name, subject)
        # Which says what cities a capital is chosen from.
        if name == "country" and (not relations or "capital" in relations):
            for country in things["country"]:
                if inside := facts.subjects.get((name, country)):
                    facts.add(country, "capital", random.choice(inside))
    return facts


def _object(random: Random, facts: Facts, subject: str, name: str, years_only: bool) -> str | None:
    relation = RELATIONS[name]
    year = random.randint(FIRST_YEAR, LAST_YEAR)
    if relation.object == "date":
        if years_only:
            return str(year)
        return (datetime.date(year, 1, 1) + datetime.timedelta(days=random.randrange(365))).isoformat()
    if relation.object == "year":
        return str(year)
    if relation.object == "number":
        return str(random.randint(3, 999) * random.choice((1, 10, 100)))
    if name == "country":  # every country has a city
        without = [country for country in facts.things["country"] if (name, country) not in facts.subjects]
        return random.choice(without or facts.things["country"])
    suitable: Sequence[str] = [other for other in facts.things[relation.object] if other != subject]
    if name == "spouse":
        suitable = [other for other in suitable if (other, name) not in facts.objects]
    return random.choice(suitable) if suitable else None
