"""A program as SPARQL 1.1, and facts as N-Triples for any RDF store.

A thing is an IRI with its name percent-encoded, so no name can end it; texts that are compared are string literals with
everything escaped. A qualified fact is described by a node of its own, beside the plain triple.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from urllib.parse import quote, unquote

from moesaic.know.language.execute import Facts
from moesaic.know.language.program import (
    ARITHMETIC,
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
    Set,
    What,
)
from moesaic.know.language.values import Value, written

THING, RELATION, PART = "urn:moesaic:thing:", "urn:moesaic:relation:", "urn:moesaic:fact:"
LABEL = "<http://www.w3.org/2000/01/rdf-schema#label>"
XSD = "http://www.w3.org/2001/XMLSchema#"
DATE = f"<{XSD}date>"


def to_sparql(program: Program) -> str:
    return Compiler().program(program)


def to_ntriples(facts: Facts) -> Iterator[str]:
    """One line for each triple; every thing has its name as its label."""
    for name in sorted(facts.names):
        yield f"{term(name)} {LABEL} {string(name, pieces=False)} ."
    number = 0
    for relation, by_subject in facts.objects.items():
        for subject, said in by_subject.items():
            for value, qualifiers in said:
                yield f"{term(subject)} {relation_iri(relation)} {term(value)} ."
                if qualifiers:
                    number += 1
                    node = f"<{PART}{number}>"
                    yield f"{node} <{PART}subject> {term(subject)} ."
                    yield f"{node} <{PART}relation> {relation_iri(relation)} ."
                    yield f"{node} <{PART}object> {term(value)} ."
                    for name, one in qualifiers.items():
                        yield f"{node} {relation_iri(name)} {term(one)} ."


def term(value: Value) -> str:
    if isinstance(value, str):
        return f"<{THING}{quote(value, safe='')}>"
    if isinstance(value, datetime.date):
        return f'"{written(value)}"^^{DATE}'
    return f'"{written(value)}"^^<{XSD}{"integer" if isinstance(value, int) else "decimal"}>'


def thing_of(iri: str) -> str:
    """The name that an IRI of `term` stands for."""
    return unquote(iri.removeprefix(THING))


def relation_iri(name: str) -> str:
    return f"<{RELATION}{quote(name, safe='')}>"


def string(text: str, *, pieces: bool = True) -> str:
    r"""A string literal. SPARQL turns \u0022 into a quotation mark before it reads anything else, and not every store
    minds a backslash before it; so in a query a text is cut wherever a u would follow a backslash."""
    named = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"}
    escaped = [
        named.get(character) or (f"\\u{ord(character):04X}" if character < " " else character) for character in text
    ]
    if not pieces:
        return f'"{"".join(escaped)}"'
    parts = [""]
    for number, character in enumerate(escaped):
        if number and text[number - 1] == "\\" and character in "uU":
            parts.append("")
        parts[-1] += character
    quoted = [f'"{part}"' for part in parts]
    return quoted[0] if len(quoted) == 1 else f"CONCAT({', '.join(quoted)})"


class Compiler:
    """Every part binds a variable of its own, so groups meet in nothing but what they are joined by."""

    def __init__(self) -> None:
        self.made = 0

    def fresh(self) -> str:
        self.made += 1
        return f"?v{self.made}"

    def program(self, program: Program) -> str:
        if isinstance(program, What):
            x = self.fresh()
            return f"SELECT DISTINCT ({x} AS ?answer) WHERE {{ {self.set(program.set, x)} }}"
        if isinstance(program, HowMany):
            x = self.fresh()
            return f"SELECT (COUNT(DISTINCT {x}) AS ?answer) WHERE {{ {self.set(program.set, x)} }}"
        if isinstance(program, IsThere):
            return f"ASK {{ {self.set(program.set, self.fresh())} }}"
        if isinstance(program, Compute):
            n = self.fresh()
            return f"SELECT ({n} AS ?answer) WHERE {{ {self.amount(program.amount, n)} }}"
        assert isinstance(program, IsAmount)
        left, right = self.fresh(), self.fresh()
        groups = f"{self.amount(program.left, left)} {self.amount(program.right, right)}"
        return f"SELECT (({left} {Compared(program.word, 0).sign} {right}) AS ?answer) WHERE {{ {groups} }}"

    def set(self, found: Set, x: str) -> str:
        if isinstance(found, Name):
            return f"VALUES {x} {{ {term(found.name)} }}"
        if isinstance(found, Literal):
            return f"VALUES {x} {{ {term(found.value)} }}"
        if isinstance(found, Everything):
            return f"{x} {LABEL} {self.fresh()} ."
        if isinstance(found, Of):
            y = self.fresh()
            return f"{{ {self.set(found.set, y)} }} {self.fact(y, found.relation, x)}"
        if isinstance(found, NamedLike):
            label = self.fresh()
            test = f"FILTER(CONTAINS({label}, {string(found.text)}))"
            return f"{{ {self.set(found.set, x)} }} {x} {LABEL} {label} . {test}"
        if isinstance(found, Joined):
            word = {"and": "", "or": "UNION", "but not": "MINUS"}[found.word]
            return f"{{ {{ {self.set(found.left, x)} }} {word} {{ {self.set(found.right, x)} }} }}"
        if isinstance(found, Extreme):
            return self.extreme(found, x)
        y = self.fresh()
        if isinstance(found.test, Is):
            return f"{{ {self.set(found.test.set, y)} }} {self.fact(x, found.relation, y)}"
        test = "" if isinstance(found.test, Known) else self.compared(found.test, y)
        return f"{self.fact(x, found.relation, y)} {test}"

    def fact(self, subject: str, relation: Relation, value: str) -> str:
        if relation.qualifier is None:
            return f"{subject} {relation_iri(relation.name)} {value} ."
        node, said = self.fresh(), self.fresh()
        test = relation.qualifier.test
        if isinstance(test, Compared):
            checked = self.compared(test, said)
        else:
            checked = self.set(test.set, said)
        return (
            f"{node} <{PART}subject> {subject} ; <{PART}relation> {relation_iri(relation.name)} ; "
            f"<{PART}object> {value} ; {relation_iri(relation.qualifier.name)} {said} . {checked}"
        )

    def compared(self, test: Compared, y: str) -> str:
        return f"FILTER({kind(y, test.dated)} && {y} {test.sign} {term(test.value)})"

    def extreme(self, found: Extreme, x: str) -> str:
        most = "MAX" if found.word in ("largest", "latest") else "MIN"
        dated = found.word in ("latest", "earliest")
        other, value, each, best = (self.fresh() for _ in range(4))
        inner = (
            f"{{ {self.set(found.set, other)} }} {self.fact(other, found.relation, each)} FILTER({kind(each, dated)})"
        )
        outer = f"{{ {self.set(found.set, x)} }} {self.fact(x, found.relation, value)} FILTER({kind(value, dated)})"
        return (
            f"{{ SELECT DISTINCT {x} WHERE {{ {outer} {{ SELECT ({most}({each}) AS {best}) WHERE {{ {inner} }} }} "
            f"FILTER({value} = {best}) }} }}"
        )

    def amount(self, amount: Amount, n: str) -> str:
        if isinstance(amount, Constant):
            return f"VALUES {n} {{ {term(amount.value)} }}"
        if isinstance(amount, NumberOf):
            x = self.fresh()
            return f"{{ SELECT (COUNT(DISTINCT {x}) AS {n}) WHERE {{ {self.set(amount.set, x)} }} }}"
        if isinstance(amount, Aggregate):
            return self.aggregate(amount, n)
        left, right = self.fresh(), self.fresh()
        groups = f"{{ {self.amount(amount.left, left)} }} {{ {self.amount(amount.right, right)} }}"
        value = f"({left} {ARITHMETIC[amount.word]} {right})"
        if amount.word == "divided by":  # Oxigraph 0.5 has no value for nought divided by a decimal
            value = f"IF({left} = 0 && {right} != 0, 0, {value})"
        return f"{groups} BIND({value} AS {n})"

    def aggregate(self, amount: Aggregate, n: str) -> str:
        x, value = self.fresh(), self.fresh()
        members = f"{{ {self.set(amount.set, x)} }} {self.fact(x, amount.relation, value)}"
        if amount.word.endswith("year"):
            year = self.fresh()
            kinds = f"FILTER(DATATYPE({value}) IN ({DATE}, <{XSD}integer>))"
            turned = f"BIND(IF(DATATYPE({value}) = {DATE}, YEAR({value}), {value}) AS {year})"
            members, value = f"{members} {kinds} {turned}", year
        else:
            members += f" FILTER({kind(value, dated=False)})"
        function = {"sum": "SUM", "average": "AVG", "largest": "MAX", "smallest": "MIN"}.get(amount.word)
        function = function or ("MAX" if amount.word == "latest year" else "MIN")
        return (
            f"{{ SELECT ({function}({value}) AS {n}) WHERE {{ {{ SELECT DISTINCT {x} {value} WHERE {{ {members} }} }} "
            f"}} HAVING(COUNT({value}) > 0) }}"
        )


def kind(variable: str, dated: bool) -> str:
    return f"DATATYPE({variable}) = {DATE}" if dated else f"isNumeric({variable})"
