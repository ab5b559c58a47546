"""Statements about a few people and countries: told, asked about, denied, and read back from a text.

What is said of people is invented; what is said of countries is true, unless a text is meant to contradict it. So a
model can know the one by heart and must read the other.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple


class Statement(NamedTuple):
    subject: str
    relation: str
    object: str

    def told(self) -> str:
        return RELATIONS[self.relation].sentence.format(s=self.subject, o=self.object)

    def denied(self) -> str:
        return RELATIONS[self.relation].denial.format(s=self.subject, o=self.object)


@dataclass(frozen=True)
class Relation:
    subject: str  # kinds of things
    object: str
    sentence: str
    denial: str
    question: str
    noun: str = ""  # what stands for the object inside a longer question


RELATIONS = {
    "home": Relation(
        *("person", "country", "{s} lives in {o}.", "{s} does not live in {o}.", "Where does {s} live?"),
        "the country where {s} lives",
    ),
    "teacher": Relation(
        *("person", "person", "{s} was taught by {o}.", "{s} was not taught by {o}.", "Who taught {s}?"),
        "the teacher of {s}",
    ),
    "age": Relation("person", "number", "{s} is {o} years old.", "{s} is not {o} years old.", "How old is {s}?"),
    "job": Relation(
        *("person", "job", "{s} works as a {o}.", "{s} does not work as a {o}.", "What does {s} work as?"),
    ),
    "capital": Relation(
        *("country", "city", "The capital of {s} is {o}.", "The capital of {s} is not {o}."),
        "What is the capital of {s}?",
    ),
    "language": Relation(
        *("country", "language", "People in {s} speak {o}.", "People in {s} do not speak {o}."),
        "What do people in {s} speak?",
    ),
}
PEOPLE = (
    *("Anna", "Bela", "Carl", "Dora", "Emil", "Finn", "Gerd", "Hugo", "Ines", "Jana", "Karl", "Lena"),
    *("Mara", "Nils", "Olga", "Paul", "Rosa", "Svea", "Tilo", "Ulla", "Vera", "Wolf", "Xenia", "Yuri"),
)
JOBS = ("baker", "farmer", "miner", "nurse", "pilot", "sailor", "singer", "tailor", "teacher", "weaver", "writer")
AGES = tuple(str(age) for age in range(20, 80))
COUNTRIES = {
    "France": ("Paris", "French"),
    "Spain": ("Madrid", "Spanish"),
    "Italy": ("Rome", "Italian"),
    "Poland": ("Warsaw", "Polish"),
    "Norway": ("Oslo", "Norwegian"),
    "Greece": ("Athens", "Greek"),
    "Sweden": ("Stockholm", "Swedish"),
    "Hungary": ("Budapest", "Hungarian"),
    "Portugal": ("Lisbon", "Portuguese"),
    "Denmark": ("Copenhagen", "Danish"),
    "Japan": ("Tokyo", "Japanese"),
    "Turkey": ("Ankara", "Turkish"),
}
OBJECTS = {
    "person": PEOPLE,
    "country": tuple(COUNTRIES),
    "number": AGES,
    "job": JOBS,
    "city": tuple(capital for capital, _ in COUNTRIES.values()),
    "language": tuple(language for _, language in COUNTRIES.values()),
}
SUBJECTS = {
    kind: tuple(name for name, one in RELATIONS.items() if one.subject == kind) for kind in ("person", "country")
}
NAME = r"([A-Z][a-z]+|[a-z]+|\d+)"
READERS = {
    name: re.compile(re.escape(one.sentence).replace(r"\{s\}", NAME, 1).replace(r"\{o\}", NAME))
    for name, one in RELATIONS.items()
}


def make_world(draw: Random, people: int, countries: int) -> dict[tuple[str, str], str]:
    """Everything that is the case of so many people and countries, by subject and relation."""
    persons, places = draw.sample(PEOPLE, people), draw.sample(list(COUNTRIES), countries)
    ages, jobs = draw.sample(AGES, people), draw.sample(JOBS, people)
    homes = [places[number % countries] for number in range(people)]
    draw.shuffle(homes)
    world: dict[tuple[str, str], str] = {}
    for number, person in enumerate(persons):
        world[person, "home"], world[person, "teacher"] = homes[number], persons[number - 1]
        world[person, "age"], world[person, "job"] = ages[number], jobs[number]
    for place in places:
        world[place, "capital"], world[place, "language"] = COUNTRIES[place]
    return world


def another(statement: Statement, draw: Random, but: tuple[str, ...] = ()) -> Statement:
    """The same with another object of its kind, none of `but`."""
    kind = OBJECTS[RELATIONS[statement.relation].object]
    left = [found for found in kind if found not in (statement.subject, statement.object, *but)]
    return statement._replace(object=draw.choice(left))


def unsaid(statements: Sequence[Statement], draw: Random) -> Statement:
    """Something of one of those that statements are about, of which they say nothing."""
    said = {(one.subject, one.relation) for one in statements}
    subject = draw.choice([one.subject for one in statements])
    relations = SUBJECTS["person" if subject in PEOPLE else "country"]
    relation = draw.choice([name for name in relations if (subject, name) not in said] or relations)
    known = tuple(one.object for one in statements if (one.subject, one.relation) == (subject, relation))
    return another(Statement(subject, relation, ""), draw, known)


def told(statements: Sequence[Statement]) -> str:
    return " ".join(statement.told() for statement in statements)


def sentences(text: str) -> list[str]:
    return [found for piece in re.split(r"(?<=[.!?])\s+", text.strip()) if (found := piece.strip())]


def read(sentence: str) -> Statement | None:
    """What a sentence states, if it is one of these forms, to the letter."""
    for relation, reader in READERS.items():
        if found := reader.fullmatch(sentence):
            return Statement(found[1], relation, found[2])
    return None
