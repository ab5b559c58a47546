"""Our own executor: a program over the triples of a knowledge base, by two indexes, in the memory of one process."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Any

from moesaic.know.language.program import (
    Aggregate,
    Amount,
    Compared,
    Compute,
    Constant,
    Everything,
    Extreme,
    HowMany,
    Is,
    IsAmount,
    IsThere,
    Joined,
    Known,
    Literal,
    Name,
    NamedLike,
    NumberOf,
    Of,
    Program,
    Relation,
    Result,
    Set,
    What,
)
from moesaic.know.language.values import Number, Value, is_date, is_number, number, order, typed, written

SIGNS = {">": operator.gt, "<": operator.lt, ">=": operator.ge, "<=": operator.le, "=": operator.eq}
PLACES = Decimal(1).scaleb(-18)  # of a quotient, as RDF stores have them

Qualifiers = Mapping[str, Value]


class Facts:
    """Facts by relation and subject, and by relation and object."""

    def __init__(self, facts: Iterable[tuple[str, str, Value, Qualifiers]]) -> None:
        self.objects: dict[str, dict[str, list[tuple[Value, Qualifiers]]]] = {}
        self.subjects: dict[str, dict[Value, list[tuple[str, Qualifiers]]]] = {}
        self.names: set[str] = set()
        for subject, relation, value, qualifiers in facts:
            self.objects.setdefault(relation, {}).setdefault(subject, []).append((value, qualifiers))
            self.subjects.setdefault(relation, {}).setdefault(value, []).append((subject, qualifiers))
            self.names.update(one for one in (subject, value, *qualifiers.values()) if isinstance(one, str))

    @classmethod
    def of(cls, triples: Iterable[Any]) -> Facts:
        """Of tuples of text whose first three are subject, relation and object, or of a graph's triples; a mapping that
        comes fourth qualifies the fact."""

        def split(triple: Any) -> tuple[str, str, Value, Qualifiers]:
            if hasattr(triple, "subject"):
                return triple.subject, triple.relation, typed(triple.object), {}
            subject, relation, value, *more = triple
            said = more[0] if more and isinstance(more[0], Mapping) else {}
            return subject, relation, typed(value), {name: typed(one) for name, one in said.items()}

        return cls(map(split, triples))

    @property
    def relations(self) -> list[str]:
        return sorted(self.objects)


def execute(program: Program, facts: Facts) -> Result:
    """Values in order, a number, whether it is so; None where nothing is known to compute with."""
    return Executor(facts).program(program)


def answer_text(result: Result) -> str:
    if isinstance(result, bool):
        return "yes" if result else "no"
    if result is None or result == []:
        return "unknown"
    return ", ".join(written(value) for value in result) if isinstance(result, list) else written(result)


class Executor:
    def __init__(self, facts: Facts) -> None:
        self.facts = facts

    def program(self, program: Program) -> Result:
        if isinstance(program, What):
            return sorted(self.members(program.set), key=order)
        if isinstance(program, HowMany):
            return len(self.members(program.set))
        if isinstance(program, IsThere):
            return bool(self.members(program.set))
        if isinstance(program, Compute):
            return self.amount(program.amount)
        assert isinstance(program, IsAmount)
        left, right = self.amount(program.left), self.amount(program.right)
        if left is None or right is None:
            return None
        return bool(SIGNS[Compared(program.word, 0).sign](left, right))

    def members(self, found: Set) -> set[Value]:
        if isinstance(found, Name):
            return {found.name}
        if isinstance(found, Literal):
            return {found.value}
        if isinstance(found, Everything):
            return set(self.facts.names)
        if isinstance(found, Of):
            return {value for one in self.members(found.set) for value in self.objects(one, found.relation)}
        if isinstance(found, NamedLike):
            return {one for one in self.members(found.set) if one in self.facts.names and found.text in str(one)}
        if isinstance(found, Joined):
            left, right = self.members(found.left), self.members(found.right)
            return left & right if found.word == "and" else left | right if found.word == "or" else left - right
        if isinstance(found, Extreme):
            pairs = self.pairs(found.set, found.relation, dated=found.word in ("latest", "earliest"))
            if not pairs:
                return set()
            values = [value for _, value in pairs]
            best = max(values) if found.word in ("largest", "latest") else min(values)
            return {one for one, value in pairs if value == best}
        by_object = self.facts.subjects.get(found.relation.name, {})
        if isinstance(found.test, Is):
            values = [value for value in self.members(found.test.set) if value in by_object]
        else:
            values = [value for value in by_object if isinstance(found.test, Known) or passes(found.test, value)]
        return {subject for value in values for subject, said in by_object[value] if qualifies(found.relation, said)}

    def objects(self, one: Value, relation: Relation) -> list[Value]:
        if not isinstance(one, str):
            return []
        said = self.facts.objects.get(relation.name, {}).get(one, [])
        return [value for value, qualifiers in said if qualifies(relation, qualifiers)]

    def pairs(self, members: Set, relation: Relation, dated: bool) -> set[tuple[Value, Any]]:
        """Each member with each of its numbers, or dates."""
        fits = is_date if dated else is_number
        return {(one, value) for one in self.members(members) for value in self.objects(one, relation) if fits(value)}

    def amount(self, amount: Amount) -> Number | None:
        if isinstance(amount, Constant):
            return amount.value
        if isinstance(amount, NumberOf):
            return len(self.members(amount.set))
        if isinstance(amount, Aggregate):
            return self.aggregate(amount)
        left, right = self.amount(amount.left), self.amount(amount.right)
        if left is None or right is None:
            return None
        if amount.word == "divided by":
            return number((Decimal(left) / Decimal(right)).quantize(PLACES)) if right != 0 else None
        calculate = {"plus": operator.add, "minus": operator.sub, "times": operator.mul}[amount.word]
        return number(Decimal(calculate(Decimal(left), Decimal(right))))

    def aggregate(self, amount: Aggregate) -> Number | None:
        if amount.word.endswith("year"):
            # A whole number is taken for a year: many bases have nothing but the year of a birth.
            pairs = self.pairs(amount.set, amount.relation, dated=True)
            years = [value.year for _, value in pairs]
            others = self.pairs(amount.set, amount.relation, dated=False)
            years += [value for _, value in others if isinstance(value, int)]
            return (max(years) if amount.word == "latest year" else min(years)) if years else None
        values = [Decimal(value) for _, value in self.pairs(amount.set, amount.relation, dated=False)]
        if not values:
            return None
        if amount.word == "average":
            return number((sum(values, Decimal(0)) / len(values)).quantize(PLACES))
        if amount.word == "sum":
            return number(sum(values, Decimal(0)))
        return number(max(values) if amount.word == "largest" else min(values))


def passes(test: Compared, value: Value) -> bool:
    return (is_date if test.dated else is_number)(value) and bool(SIGNS[test.sign](value, test.value))


def qualifies(relation: Relation, said: Qualifiers) -> bool:
    if relation.qualifier is None:
        return True
    value = said.get(relation.qualifier.name)
    if value is None:
        return False
    test = relation.qualifier.test
    if isinstance(test, Compared):
        return passes(test, value)
    wanted = test.set
    assert isinstance(wanted, Name | Literal)
    return value == (wanted.name if isinstance(wanted, Name) else wanted.value)
