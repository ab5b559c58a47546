"""Questions of one or several hops about made-up worlds, answered by searching their documents (RAG-Gym).

    moesaic evaluate DIR --suite agents environments=multihop settings='{form: react, hops: [2]}'
    environment: {name: multihop, form: re2search, hops: [1, 2], people: 12}      # of a policy or trajectories stage

Worlds are made from a seed (`data/tasks/multihop.py`), so it is known which documents an answer rests on: queries are
scored by them (`searching.py`). Every task has a world of its own, and those that are trained in share no name with
those that the suite asks in, and no part of one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Literal

from moesaic.data.tasks import multihop
from moesaic.errors import UserError
from moesaic.worlds.environments import Episode
from moesaic.worlds.example import Example
from moesaic.worlds.search_forms import FORMS
from moesaic.worlds.searching import Asked, Outcome, ProcessReward, Searching, SearchRules, TextRetriever
from moesaic.worlds.text_actions import World

TRIES = 20  # worlds that may lack a question of the kind


@dataclass(frozen=True)
class WorldShape:
    kinds: tuple[str, ...]
    hops: tuple[int, ...]
    people: int
    phrasings: int
    distractors: int
    years_only: bool
    relations: tuple[str, ...]
    short_names: bool
    facts: bool


@dataclass(frozen=True)
class Multihop(World):
    turns: int = 6
    kinds: tuple[str, ...] = ("bridge",)  # of questions
    hops: tuple[int, ...] = (1, 2)
    people: int = 8  # of a world
    phrasings: int = 1  # ways to tell and to ask a fact, up to 4
    distractors: int = 0  # documents that no answer rests on
    years_only: bool = True  # years of birth, not dates
    relations: tuple[str, ...] = ()  # facts of these only; none named: all
    short_names: bool = False  # every name is one word of four letters
    documents: Literal["texts", "facts"] = "texts"  # facts: a line of relations and values, for very small models
    passages: int = 2  # that a query shows
    longest: int = 600  # characters of one
    form: str = "direct"  # how the agent speaks: direct, react, re2search
    instructions: str | None = None  # in place of the form's own
    outcome: Outcome = "exact"
    process: Mapping[str, float] = field(default_factory=dict)  # weights of sufficiency, utility and novelty

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.rules
        if FORMS[self.form].calls:
            raise ValueError("form is direct, react or re2search: what the suite agents hears is text")
        if unknown := set(self.kinds) - set(multihop.KINDS):
            raise ValueError(f"kinds: there is no {', '.join(sorted(unknown))}; known: {', '.join(multihop.KINDS)}")
        if unknown := set(self.relations) - set(multihop.RELATIONS):
            known = ", ".join(multihop.RELATIONS)
            raise ValueError(f"relations: there is no {', '.join(sorted(unknown))}; known: {known}")
        if min(self.hops, default=0) < 1 or self.people < 3 or not 1 <= self.phrasings <= 4 or self.distractors < 0:
            raise ValueError("hops are at least 1, people at least 3, phrasings 1 to 4, and distractors at least 0")
        if not any(hops >= multihop.FEWEST[kind] for hops in self.hops for kind in self.kinds):
            raise ValueError("no question of these kinds has so few hops")

    @cached_property
    def rules(self) -> SearchRules:
        shown = self.turns, self.passages, self.longest, self.mistakes
        return SearchRules(*shown, self.form, self.outcome, ProcessReward.of(self.process))

    @cached_property
    def shape(self) -> WorldShape:
        counts = self.people, self.phrasings, self.distractors, self.years_only
        facts = tuple(self.relations), self.short_names, self.documents == "facts"
        return WorldShape(tuple(self.kinds), tuple(self.hops), *counts, *facts)

    def begin(self, example: Example) -> Episode:
        seed, number = example.facts["world"]
        asked, retriever = _task(seed, number, self.shape)
        instructions = FORMS[self.form].instructions if self.instructions is None else self.instructions
        opening = f"{instructions}\nQuestion: {asked.question}" if instructions else asked.question
        return Searching([{"role": "user", "content": opening}], [], asked, retriever, self.rules)


@lru_cache(maxsize=1024)
def _task(seed: int | str, number: int, shape: WorldShape) -> tuple[Asked, TextRetriever]:
    """A world and one question about it, kinds and hops by turns. Rollouts of a group share it and do not change it."""
    turns = [(kind, hops) for hops in shape.hops for kind in shape.kinds if hops >= multihop.FEWEST[kind]]
    kind, hops = turns[number % len(turns)]
    for attempt in range(TRIES):
        made = multihop.world(
            _number(seed, number, attempt),
            split="test" if isinstance(seed, int) else "train",
            people=shape.people,
            hops=(hops,),
            kinds=(kind,),
            questions=1,
            phrasings=shape.phrasings,
            distractors=shape.distractors,
            years_only=shape.years_only,
            relations=shape.relations,
            short_names=shape.short_names,
        )
        if made.questions:
            (question,) = made.questions
            asked = Asked(question.text, (question.answer, *question.aliases), question.supporting)
            return asked, TextRetriever(_facts(made) if shape.facts else made.documents)
    problem = f"no world of {shape.people} people has a {kind} question of {hops} hops"
    raise UserError("environment: multihop", problem, "Take more people, or other kinds and hops.")


def _facts(made: multihop.World) -> list[tuple[str, str]]:
    """Documents that say no more than the triples."""
    told: dict[str, list[str]] = {title: [] for title, _ in made.documents}
    for subject, relation, value in made.triples:
        told.get(subject, []).append(f"{relation} {multihop.spoken(value)}")
    return [(title, f"{title}: {', '.join(facts)}.") for title, facts in told.items() if facts]


def _number(*parts: int | str) -> int:
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=6).digest(), "little")
