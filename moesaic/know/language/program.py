"""The abstract syntax of the language; `str` of any part is its text.

Words are the language's own: they stand in programs, in the grammar and here.
"""

from __future__ import annotations

import datetime
import json
from dataclasses import dataclass
from typing import Literal as OneOf

from moesaic.know.language.values import Number, Value, written

# Of numbers, and of dates.
COMPARED = {"above": ">", "below": "<", "at least": ">=", "at most": "<=", "equal to": "="}
DATED = {"after": ">", "before": "<", "from": ">=", "until": "<="}
EXTREMES = ("largest", "smallest", "latest", "earliest")
AGGREGATES = ("sum", "average", "largest", "smallest", "latest year", "earliest year")
ARITHMETIC = {"plus": "+", "minus": "-", "times": "*", "divided by": "/"}


def bracketed(name: str, left: str, right: str) -> str:
    """A name between its brackets; what would end it, and line breaks, behind a backslash."""
    text = name.replace("\\", "\\\\").replace(right, f"\\{right}").replace("\n", "\\n").replace("\r", "\\r")
    return f"{left}{text}{right}"


@dataclass(frozen=True)
class Name:
    name: str

    def __str__(self) -> str:
        return bracketed(self.name, "[", "]")


@dataclass(frozen=True)
class Literal:
    value: Number | datetime.date

    def __str__(self) -> str:
        return written(self.value)


@dataclass(frozen=True)
class Everything:
    def __str__(self) -> str:
        return "everything"


@dataclass(frozen=True)
class Is:
    set: Set

    def __str__(self) -> str:
        return f"is {self.set}"


@dataclass(frozen=True)
class Known:
    def __str__(self) -> str:
        return "is known"


@dataclass(frozen=True)
class Compared:
    word: str  # of COMPARED or DATED
    value: Number | datetime.date

    def __str__(self) -> str:
        return f"{self.word} {written(self.value)}"

    @property
    def dated(self) -> bool:
        return self.word in DATED

    @property
    def sign(self) -> str:
        return (COMPARED | DATED)[self.word]


Test = Is | Known | Compared


@dataclass(frozen=True)
class Qualifier:
    """Said of a fact, such as since when: `test` is of one value, or a comparison."""

    name: str
    test: Is | Compared

    def __str__(self) -> str:
        return f" where {bracketed(self.name, '<', '>')} {self.test}"


@dataclass(frozen=True)
class Relation:
    name: str
    qualifier: Qualifier | None = None

    def __str__(self) -> str:
        return f"{bracketed(self.name, '<', '>')}{self.qualifier or ''}"


@dataclass(frozen=True)
class Of:
    """Objects of a relation."""

    relation: Relation
    set: Set

    def __str__(self) -> str:
        return f"{self.relation} of {self.set}"


@dataclass(frozen=True)
class Whose:
    """Subjects of a relation."""

    relation: Relation
    test: Test

    def __str__(self) -> str:
        return f"those whose {self.relation} {self.test}"


@dataclass(frozen=True)
class Joined:
    left: Set
    word: OneOf["and", "or", "but not"]
    right: Set

    def __str__(self) -> str:
        return f"( {self.left} {self.word} {self.right} )"


@dataclass(frozen=True)
class Extreme:
    """Those of a set with the extreme value of a relation, all of them if they share it."""

    set: Set
    word: str  # of EXTREMES
    relation: Relation

    def __str__(self) -> str:
        return f"( {self.set} with the {self.word} {self.relation} )"


@dataclass(frozen=True)
class NamedLike:
    set: Set
    text: str

    def __str__(self) -> str:
        return f"( {self.set} named like {json.dumps(self.text, ensure_ascii=False)} )"


Set = Name | Literal | Everything | Of | Whose | Joined | Extreme | NamedLike


@dataclass(frozen=True)
class NumberOf:
    set: Set

    def __str__(self) -> str:
        return f"the number of {self.set}"


@dataclass(frozen=True)
class Aggregate:
    """Over each member of a set with each of its values; without any value there is no number."""

    word: str  # of AGGREGATES
    relation: Relation
    set: Set

    def __str__(self) -> str:
        return f"the {self.word} {self.relation} of {self.set}"


@dataclass(frozen=True)
class Constant:
    value: Number

    def __str__(self) -> str:
        return written(self.value)


@dataclass(frozen=True)
class Arithmetic:
    left: Amount
    word: str  # of ARITHMETIC
    right: Amount

    def __str__(self) -> str:
        return f"( {self.left} {self.word} {self.right} )"


Amount = NumberOf | Aggregate | Constant | Arithmetic


@dataclass(frozen=True)
class What:
    set: Set

    def __str__(self) -> str:
        return f"what is {self.set}"


@dataclass(frozen=True)
class HowMany:
    set: Set

    def __str__(self) -> str:
        return f"how many are {self.set}"


@dataclass(frozen=True)
class IsThere:
    set: Set

    def __str__(self) -> str:
        return f"is there any {self.set}"


@dataclass(frozen=True)
class Compute:
    amount: Amount

    def __str__(self) -> str:
        return f"compute {self.amount}"


@dataclass(frozen=True)
class IsAmount:
    left: Amount
    word: str  # of COMPARED
    right: Amount

    def __str__(self) -> str:
        return f"is {self.left} {self.word} {self.right}"


Program = What | HowMany | IsThere | Compute | IsAmount
Result = list[Value] | Number | bool | None  # None: nothing is known
