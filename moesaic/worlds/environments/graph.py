"""Questions of several hops over a graph of made-up people and places, asked through four tools (as in AgentBench).

    moesaic evaluate DIR --suite agents environments=graph

What a tool finds is a set with a name, #0, #1 and so on, that other tools take. The graph is larger than what is shown
at once, so that sets have to be worked with.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass

from moesaic.worlds.text_actions import FORM, Finished, Invalid, Simulation, World, same

SHOWN = 12  # entities of a set
PEOPLE, CITIES, COUNTRIES, COMPANIES = 60, 6, 3, 8
INSTRUMENTS = ("cello", "drums", "flute", "guitar", "piano")
# A relation, and how it is called from the other end.
BACK = {
    "lives_in": "has_resident",
    "works_for": "employs",
    "plays": "played_by",
    "manager": "manages",
    "based_in": "seat_of",
    "located_in": "has_city",
}

RULES = """You are asked about a graph of entities and relations. It can be looked at through these tools only:
get_relations(ENTITY): the relations that an entity, or the members of a set, have
get_neighbors(ENTITY, RELATION): the set of entities that the relation leads to
intersection(SET, SET): the entities that are in both
count(SET): how many there are
answer(...): give the final answer: a set, a name, or a number
ENTITY is a name, or a set that a tool gave you (#0, #1, ...). {form}
For example: Action: get_neighbors({example}, lives_in)
Question: {question}"""


@dataclass(frozen=True)
class Graph:
    edges: dict[tuple[str, str], frozenset[str]]  # entity and relation

    def step(self, entities: frozenset[str], relation: str) -> frozenset[str]:
        return frozenset().union(*(self.edges.get((entity, relation), ()) for entity in entities))

    @property
    def entities(self) -> set[str]:
        return {entity for entity, _ in self.edges}

    def relations(self, entities: frozenset[str]) -> list[str]:
        return sorted({relation for entity, relation in self.edges if entity in entities})


@dataclass(frozen=True)
class Asked:
    question: str
    names: frozenset[str] | None  # what is looked for,
    number: int | None = None  # or how many there are


def _names(draw: random.Random, count: int, ending: str) -> list[str]:
    found: list[str] = []
    while len(found) < count:
        syllables = (draw.choice("bdfgklmnprstv") + draw.choice("aeiou") for _ in range(3))
        if (name := ("".join(syllables) + ending).capitalize()) not in found:
            found.append(name)
    return found


def make_graph(draw: random.Random) -> tuple[Graph, list[str], dict[tuple[str, str], str]]:
    """A graph, its people, and the one thing that each (entity, relation) leads to."""
    people, cities = _names(draw, PEOPLE, ""), _names(draw, CITIES, "ville")
    countries, companies = _names(draw, COUNTRIES, "land"), _names(draw, COMPANIES, "corp")
    leads = {(city, "located_in"): draw.choice(countries) for city in cities}
    leads |= {(company, "based_in"): draw.choice(cities) for company in companies}
    for number, person in enumerate(people):
        leads[person, "lives_in"] = draw.choice(cities)
        leads[person, "works_for"] = draw.choice(companies)
        leads[person, "plays"] = draw.choice(INSTRUMENTS)
        if number:
            leads[person, "manager"] = people[draw.randrange(number)]
    edges: dict[tuple[str, str], set[str]] = {}
    for (entity, relation), other in leads.items():
        edges.setdefault((entity, relation), set()).add(other)
        edges.setdefault((other, BACK[relation]), set()).add(entity)
    return Graph({key: frozenset(others) for key, others in edges.items()}), people, leads


# Questions, their truth found from what each person is, and not by the walks that the tools make.
Leads = dict[tuple[str, str], str]


def _country_of(people: list[str], leads: Leads, draw: random.Random) -> Asked:
    person = draw.choice(people)
    truth = leads[leads[person, "lives_in"], "located_in"]
    return Asked(f"In which country is the city that {person} lives in?", frozenset({truth}))


def _seat_of_managers_company(people: list[str], leads: Leads, draw: random.Random) -> Asked:
    person = draw.choice(people[1:])
    truth = leads[leads[leads[person, "manager"], "works_for"], "based_in"]
    return Asked(f"In which city is the company based that the manager of {person} works for?", frozenset({truth}))


def _both(people: list[str], leads: Leads, draw: random.Random) -> Asked:
    one = draw.choice(people)
    city, company = leads[one, "lives_in"], leads[one, "works_for"]
    found = frozenset(p for p in people if leads[p, "lives_in"] == city and leads[p, "works_for"] == company)
    return Asked(f"Who lives in {city} and works for {company}? Name all of them.", found)


def _how_many(people: list[str], leads: Leads, draw: random.Random) -> Asked:
    one = draw.choice(people)
    city, instrument = leads[one, "lives_in"], leads[one, "plays"]
    found = [p for p in people if leads[p, "lives_in"] == city and leads[p, "plays"] == instrument]
    return Asked(f"How many people who live in {city} play the instrument {instrument}?", None, len(found))


def _how_many_in_country(people: list[str], leads: Leads, draw: random.Random) -> Asked:
    one = draw.choice(people)
    country, company = leads[leads[one, "lives_in"], "located_in"], leads[one, "works_for"]
    found = [
        p for p in people if leads[leads[p, "lives_in"], "located_in"] == country and leads[p, "works_for"] == company
    ]
    return Asked(f"How many people who work for {company} live in a city of {country}?", None, len(found))


KINDS: tuple[Callable[[list[str], Leads, random.Random], Asked], ...] = (
    _country_of,
    _seat_of_managers_company,
    _both,
    _how_many,
    _how_many_in_country,
)


class Questioning(Simulation):
    def __init__(self, draw: random.Random, number: int) -> None:
        self.graph, people, leads = make_graph(draw)
        self.asked = KINDS[number % len(KINDS)](people, leads, draw)
        self.example = draw.choice(people)
        self.sets: list[frozenset[str]] = []

    def open(self) -> str:
        return RULES.format(form=FORM, example=self.example, question=self.asked.question)

    def act(self, action: str) -> str | Finished:
        called = re.fullmatch(r"(\w+)\s*\((.*)\)\.?", action)
        if called is None:
            raise Invalid("That is no call of a tool. A call is such as: count(#0)")
        name, given = called[1], [part.strip().strip("'\"") for part in called[2].split(",")]
        if name == "answer":
            return Finished(float(self._right(given)))
        tools = {"get_relations": 1, "get_neighbors": 2, "intersection": 2, "count": 1}
        if name not in tools:
            raise Invalid(f'There is no tool "{name}". Tools: {", ".join(tools)}, answer.')
        if len(given) != tools[name]:
            raise Invalid(f"{name} takes {tools[name]}, not {len(given)}.")
        if name == "get_relations":
            return f"Relations: {', '.join(self.graph.relations(self._set(given[0])))}."
        if name == "count":
            return f"{len(self._set(given[0]))}"
        if name == "intersection":
            return self._keep(self._set(given[0]) & self._set(given[1]))
        entities, relation = self._set(given[0]), given[1]
        if relation not in (known := self.graph.relations(entities)):
            raise Invalid(f'There is no relation "{relation[:50]}" there. Relations: {", ".join(known) or "none"}.')
        return self._keep(self.graph.step(entities, relation))

    def _set(self, name: str) -> frozenset[str]:
        if name.startswith("#"):
            if not re.fullmatch(r"#\d{1,3}", name) or int(name[1:]) >= len(self.sets):
                raise Invalid(f'There is no set "{name[:50]}". Sets so far: {len(self.sets)}.')
            return self.sets[int(name[1:])]
        if name not in self.graph.entities:
            raise Invalid(f'There is no entity "{name[:50]}".')
        return frozenset({name})

    def _keep(self, found: frozenset[str]) -> str:
        self.sets.append(found)
        names = sorted(found)
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        return f"#{len(self.sets) - 1}: {', '.join(names[:SHOWN]) or 'nobody and nothing'}{more}"

    def _right(self, given: list[str]) -> bool:
        if self.asked.number is not None:
            return len(given) == 1 and same(given[0], str(self.asked.number))
        if len(given) == 1 and given[0].startswith("#"):
            return self._set(given[0]) == self.asked.names
        return frozenset(given) == self.asked.names


@dataclass(frozen=True)
class KnowledgeGraph(World):
    turns: int = 10

    def simulation(self, draw: random.Random, number: int) -> Simulation:
        return Questioning(draw, number)
