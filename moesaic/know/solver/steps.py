"""Steps of a logical form, their text, and the grammar of that text, so that a small model cannot write another.

x1 = retrieve("Ada", "teacher", ?)       objects; with ? first, subjects
x2 = math(count x1)                      count, sum, average of one; minus, plus, times, divided by of two
x3 = deduce(same x1 x2)                  whether they share a value; any: whether there is one
x4 = deduce(both x1 x2)                  either, without: sets
x5 = deduce(largest x1 by x2)            of x1, whose value in x2 is the largest; smallest, latest, earliest
output(x5)
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from moesaic.errors import UserError

MOST_STEPS = 9
OF_ONE = ("count", "sum", "average")
OF_TWO = ("minus", "plus", "times", "divided by")
SETS = ("same", "both", "either", "without")
EXTREMES = ("largest", "smallest", "latest", "earliest")


@dataclass(frozen=True)
class Variable:
    name: str

    def __str__(self) -> str:
        return self.name


Term = str | Variable  # a str is a name


def shown(term: Term | None) -> str:
    return "?" if term is None else str(term) if isinstance(term, Variable) else json.dumps(term, ensure_ascii=False)


@dataclass(frozen=True)
class Retrieve:
    """The object is asked for, or the subject: that which is None."""

    subject: Term | None
    relation: str
    object: Term | None

    def __str__(self) -> str:
        return f"retrieve({shown(self.subject)}, {shown(self.relation)}, {shown(self.object)})"


@dataclass(frozen=True)
class Math:
    word: str  # of OF_ONE or OF_TWO
    left: Term
    right: Term | None = None

    def __str__(self) -> str:
        if self.right is None:
            return f"math({self.word} {shown(self.left)})"
        return f"math({shown(self.left)} {self.word} {shown(self.right)})"


@dataclass(frozen=True)
class Deduce:
    word: str  # "any", or of SETS or EXTREMES
    left: Term
    right: Term | None = None

    def __str__(self) -> str:
        if self.right is None:
            return f"deduce({self.word} {shown(self.left)})"
        by = "by " if self.word in EXTREMES else ""
        return f"deduce({self.word} {shown(self.left)} {by}{shown(self.right)})"


Action = Retrieve | Math | Deduce


@dataclass(frozen=True)
class Plan:
    steps: tuple[tuple[Variable, Action], ...]
    output: Term

    def __str__(self) -> str:
        return "\n".join([*(f"{name} = {action}" for name, action in self.steps), f"output({shown(self.output)})"])


class NotAPlan(UserError):
    """Text that is no plan."""


def plan_grammar() -> str:
    def words(options: tuple[str, ...]) -> str:
        return " | ".join(json.dumps(f"{option} ") for option in options)

    return f"""
start: (step "\\n"){{1,{MOST_STEPS}}} "output(" VARIABLE ")"
step: VARIABLE " = " (retrieve | "math(" math ")" | "deduce(" deduce ")")
retrieve: "retrieve(" (term ", " TEXT ", ?" | "?, " TEXT ", " term) ")"
math: ({words(OF_ONE)}) term | term " " ({words(OF_TWO)}) term
deduce: "any " term | ({words(SETS)}) term " " term | ({words(EXTREMES)}) term " by " term
term: VARIABLE | TEXT
VARIABLE: /x[1-9]/
TEXT: /"[^"\\\\\\n\\x00-\\x1f]{{1,80}}"/
"""


TERM = r'(x[1-9]|"(?:[^"\\]|\\.)*")'
STEP = re.compile(r"(x[1-9]) = (retrieve|math|deduce)\((.*)\)")
RETRIEVE = re.compile(rf'(?:{TERM}|\?), ("(?:[^"\\]|\\.)*"), (?:{TERM}|\?)')
ONE = re.compile(rf"({'|'.join((*OF_ONE, 'any'))}) {TERM}")
TWO = re.compile(rf"{TERM} ({'|'.join(OF_TWO)}) {TERM}")
PAIR = re.compile(rf"({'|'.join((*SETS, *EXTREMES))}) {TERM} (?:by )?{TERM}")


def read_plan(text: str) -> Plan:
    steps: list[tuple[Variable, Action]] = []
    known: set[str] = set()

    def term(found: str | None) -> Term | None:
        if found is None:
            return None
        if found.startswith('"'):
            return str(json.loads(found))
        if found not in known:
            raise NotAPlan("plan", f"{found} is used before it is found")
        return Variable(found)

    for line in text.strip().splitlines():
        if end := re.fullmatch(rf"output\({TERM}\)", line.strip()):
            output = term(end[1])
            assert output is not None
            return Plan(tuple(steps), output)
        match = STEP.fullmatch(line.strip())
        action = _action(match[2], match[3], term) if match else None
        if match is None or action is None:
            raise NotAPlan("plan", f"{line.strip()[:80]!r} is no step")
        steps.append((Variable(match[1]), action))
        known.add(match[1])
    raise NotAPlan("plan", "has no output")


def _action(kind: str, inside: str, term: Callable[[str | None], Any]) -> Action | None:
    if kind == "retrieve":
        match = RETRIEVE.fullmatch(inside)
        if match is None or (match[1] is None) == (match[3] is None):
            return None
        return Retrieve(term(match[1]), json.loads(match[2]), term(match[3]))
    if one := ONE.fullmatch(inside):
        made: type[Math] | type[Deduce] = Math if kind == "math" else Deduce
        return made(one[1], term(one[2])) if (one[1] == "any") == (kind == "deduce") else None
    if kind == "math" and (two := TWO.fullmatch(inside)):
        return Math(two[2], term(two[1]), term(two[3]))
    if kind == "deduce" and (pair := PAIR.fullmatch(inside)):
        return Deduce(pair[1], term(pair[2]), term(pair[3]))
    return None


class Steps:
    """Makes a plan step by step."""

    def __init__(self) -> None:
        self.steps: list[tuple[Variable, Action]] = []

    def add(self, action: Action) -> Variable:
        for name, known in self.steps:
            if known == action:
                return name
        self.steps.append((Variable(f"x{len(self.steps) + 1}"), action))
        return self.steps[-1][0]

    def plan(self, output: Term) -> Plan:
        return Plan(tuple(self.steps), output)
