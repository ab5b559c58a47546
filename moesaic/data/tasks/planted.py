"""Planted facts: episodes that each say other things of the same people, and ask what follows from them.

    episode = planted(0)
    episode.facts                         # {"Anna": 4, "Karl": 9}: the same name is another number in another episode
    episode.text()                        # "Facts:\\nAnna is 4\\n...\\n\\nWhat is Anna plus Karl? 13\\n..."

A question needs facts and a step of reasoning, or (both numbers given) the step alone, or a fact alone: so what a
model knows and how it reasons can be measured apart. The source `builtin:facts` is made of them, for the objective
`knowledge`.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

HEAD = "Facts:"  # begins a document that brings facts, one a line up to an empty line
NAMES = (
    *("Anna", "Bela", "Carl", "Dora", "Emil", "Finn", "Gerd", "Hugo", "Ines", "Jana", "Karl", "Lena"),
    *("Mara", "Nils", "Olga", "Paul", "Rosa", "Svea", "Tilo", "Ulla", "Vera", "Wolf", "Xenia", "Yuri"),
)
RECALLED = 0.4  # questions that ask for a fact as it stands
FIRST_SEED = {"train": 0, "test": 1 << 40}


@dataclass(frozen=True)
class Question:
    text: str  # with a blank where the answer goes, at its end
    answer: str
    named: int  # how many of its numbers are facts


@dataclass(frozen=True)
class Episode:
    facts: dict[str, int]
    questions: tuple[Question, ...]

    def base(self) -> str:
        """As lines of a knowledge.txt."""
        return "".join(f"{name} is {number}\n" for name, number in self.facts.items())

    def text(self) -> str:
        asked = "".join(f"{question.text}{question.answer}\n" for question in self.questions)
        return f"{HEAD}\n{self.base()}\n{asked}"


def planted(number: int, split: str = "train", facts: int = 6, questions: int = 3) -> Episode:
    """The episode with a number, the same everywhere."""
    draw = random.Random(FIRST_SEED[split] + number)
    known = {name: draw.randrange(10) for name in draw.sample(NAMES, facts)}
    return Episode(known, tuple(question(known, draw) for _ in range(questions)))


def question(facts: dict[str, int], draw: random.Random, named: int | None = None) -> Question:
    """About two numbers, `named` of which are facts; as it falls, if it is not said, and then also for a fact alone."""
    if named is None and draw.random() < RECALLED:
        name = draw.choice(list(facts))
        return Question(f"What is {name}? ", str(facts[name]), 1)
    named = draw.choice((0, 1, 1, 2)) if named is None else named
    parts = [(name, facts[name]) for name in draw.sample(list(facts), named)]
    parts += [(str(digit), digit) for digit in (draw.randrange(10) for _ in range(2 - named))]
    draw.shuffle(parts)
    (one, left), (other, right) = parts
    return Question(f"What is {one} plus {other}? ", str(left + right), named)
