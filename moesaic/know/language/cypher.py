"""A program as openCypher, one line for each step, and facts as statements that load them.

Things are `(:Thing {name})`, values `(:Amount {number})` and `(:Day {date})` with the date as text (ISO dates are
ordered as their texts), and a fact is `(:Thing)-[:FACT {relation, q_...}]->()`, so a relation is a value and never an
identifier. Names are parameters. `Query.inline()` writes them into the text, for a shell that takes none.

Nothing but MATCH, WITH, UNWIND and lists is used, which Neo4j, Memgraph and others share.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from decimal import Decimal

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

Parameter = str | int | float
Where = Callable[[str, str], str]  # a condition on a fact's subject and object


@dataclass
class Query:
    text: str
    parameters: dict[str, Parameter] = field(default_factory=dict)

    def inline(self) -> str:
        def literal(match: re.Match[str]) -> str:
            value = self.parameters[match[1]]
            return string(value) if isinstance(value, str) else repr(value)

        return re.sub(r"\$(p[0-9]+)", literal, self.text)


def string(text: str) -> str:
    r"""A literal. Neo4j before version 5 turns \u0027 into a quotation mark before it reads anything else, behind
    a backslash too; so a text is cut wherever a u would follow a backslash."""
    named = {"\\": "\\\\", "'": "\\'", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
    parts = [""]
    for number, character in enumerate(text):
        if number and text[number - 1] == "\\" and character in "uU":
            parts.append("")
        parts[-1] += named.get(character, character)
    return " + ".join(f"'{part}'" for part in parts)


def to_cypher(program: Program) -> Query:
    return Compiler().program(program)


def to_statements(facts: Facts) -> Iterator[Query]:
    """What loads the facts into an empty graph: one statement for each."""
    for relation, by_subject in facts.objects.items():
        for subject, said in by_subject.items():
            for value, qualifiers in said:
                query = Compiler()
                properties = [f"relation: {query.parameter(relation)}"]
                for name, one in qualifiers.items():
                    properties += [f"{qualifier(name)}_{kind(one)}: {query.parameter(plain(one))}"]
                yield Query(
                    f"MERGE (s:Thing {{name: {query.parameter(subject)}}}) MERGE (o:{node(query, value)}) "
                    f"CREATE (s)-[:FACT {{{', '.join(properties)}}}]->(o)",
                    query.parameters,
                )
                for one in qualifiers.values():
                    if isinstance(one, str):
                        named = Compiler()
                        yield Query(f"MERGE (:Thing {{name: {named.parameter(one)}}})", named.parameters)


def kind(value: Value) -> str:
    return "name" if isinstance(value, str) else "date" if isinstance(value, datetime.date) else "number"


def plain(value: Value) -> Parameter:
    if isinstance(value, datetime.date):
        return written(value)
    return float(value) if isinstance(value, Decimal) else value


def node(query: Compiler, value: Value) -> str:
    label = {"name": "Thing", "date": "Day", "number": "Amount"}[kind(value)]
    return f"{label} {{{kind(value)}: {query.parameter(plain(value))}}}"


def qualifier(name: str) -> str:
    """A property's name: letters and digits, and everything else by its number, so that it needs no quoting."""
    return "q_" + "".join(c if c.isascii() and c.isalnum() else f"_{ord(c):x}_" for c in name)


class Compiler:
    """Each set is a list with a name (s1, s2, ...), made by one line and carried by those after it. Nodes of a line
    have its number, so no name is used twice."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.names: list[str] = []  # of all lists and numbers so far
        self.parameters: dict[str, Parameter] = {}

    def parameter(self, value: Parameter) -> str:
        name = f"p{len(self.parameters)}"
        self.parameters[name] = value
        return f"${name}"

    def step(self, expression: str, before: str = "") -> str:
        name = f"s{len(self.names) + 1}"
        self.lines.append(f"{before}{' ' if before else ''}WITH {', '.join([*self.names, f'{expression} AS {name}'])}")
        self.names.append(name)
        return name

    def program(self, program: Program) -> Query:
        if isinstance(program, What):
            last = f"UNWIND {self.set(program.set)} AS a RETURN DISTINCT coalesce(a.name, a.date, a.number) AS answer"
        elif isinstance(program, HowMany):
            last = f"RETURN size({self.set(program.set)}) AS answer"
        elif isinstance(program, IsThere):
            last = f"RETURN size({self.set(program.set)}) > 0 AS answer"
        elif isinstance(program, Compute):
            last = f"RETURN {self.amount(program.amount)} AS answer"
        else:
            assert isinstance(program, IsAmount)
            left, right = self.amount(program.left), self.amount(program.right)
            last = f"RETURN {left} {Compared(program.word, 0).sign} {right} AS answer"
        return Query("\n".join([*self.lines, last]), self.parameters)

    def set(self, found: Set) -> str:
        if isinstance(found, Name):
            return self.listed(f":{node(self, found.name)}")
        if isinstance(found, Literal):
            return self.listed(f":{node(self, found.value)}")
        if isinstance(found, Everything):
            return self.listed(":Thing")
        if isinstance(found, Of):
            members = self.set(found.set)
            return self.step(*self.match(found.relation, lambda s, o: f"{s} IN {members}", "collect(DISTINCT {o})"))
        if isinstance(found, NamedLike):
            members = self.set(found.set)
            return self.step(f"[e IN {members} WHERE e.name CONTAINS {self.parameter(found.text)}]")
        if isinstance(found, Joined):
            left, right = self.set(found.left), self.set(found.right)
            if found.word == "or":
                return self.step(f"{left} + [e IN {right} WHERE NOT e IN {left}]")
            return self.step(f"[e IN {left} WHERE {'NOT ' if found.word == 'but not' else ''}e IN {right}]")
        if isinstance(found, Extreme):
            members, of = self.set(found.set), "date" if found.word in ("latest", "earliest") else "number"
            function = f"{'max' if found.word in ('largest', 'latest') else 'min'}({{o}}.{of})"
            most = self.step(
                *self.match(found.relation, lambda s, o: f"{s} IN {members} AND {o}.{of} IS NOT NULL", function)
            )
            return self.subjects(found.relation, lambda s, o: f"{s} IN {members} AND {o}.{of} = {most}")
        test = found.test
        if isinstance(test, Is):
            members = self.set(test.set)
            return self.subjects(found.relation, lambda s, o: f"{o} IN {members}")
        if isinstance(test, Known):
            return self.subjects(found.relation, lambda s, o: "")
        return self.subjects(found.relation, lambda s, o: self.compared(f"{o}.", test))

    def listed(self, pattern: str) -> str:
        x = f"x{len(self.names) + 1}"
        return self.step(f"collect(DISTINCT {x})", f"OPTIONAL MATCH ({x}{pattern})")

    def subjects(self, relation: Relation, where: Where) -> str:
        return self.step(*self.match(relation, where, "collect(DISTINCT {s})"))

    def match(self, relation: Relation, where: Where, expression: str) -> tuple[str, str]:
        """What is made of facts' subjects {s} and objects {o}, and the clause that finds them."""
        number = len(self.names) + 1
        s, o, f = f"x{number}", f"y{number}", f"f{number}"
        conditions = [condition] if (condition := where(s, o)) else []
        if relation.qualifier is not None:
            test, name = relation.qualifier.test, f"{f}.{qualifier(relation.qualifier.name)}_"
            if isinstance(test, Compared):
                conditions.append(self.compared(name, test))
            else:
                one = test.set.name if isinstance(test.set, Name) else getattr(test.set, "value", None)
                assert one is not None
                conditions.append(f"{name}{kind(one)} = {self.parameter(plain(one))}")
        wanted = f" WHERE {' AND '.join(conditions)}" if conditions else ""
        fact = f"[{f}:FACT {{relation: {self.parameter(relation.name)}}}]"
        return expression.format(s=s, o=o), f"OPTIONAL MATCH ({s}:Thing)-{fact}->({o}){wanted}"

    def compared(self, prefix: str, test: Compared) -> str:
        return f"{prefix}{'date' if test.dated else 'number'} {test.sign} {self.parameter(plain(test.value))}"

    def amount(self, amount: Amount) -> str:
        if isinstance(amount, Constant):
            return self.step(self.parameter(plain(amount.value)))
        if isinstance(amount, NumberOf):
            return self.step(f"size({self.set(amount.set)})")
        if isinstance(amount, Aggregate):
            return self.aggregate(amount)
        left, right = self.amount(amount.left), self.amount(amount.right)
        if amount.word == "divided by":  # whole numbers would be divided without a rest
            return self.step(f"CASE WHEN {right} = 0 THEN null ELSE 1.0 * {left} / {right} END")
        return self.step(f"{left} {ARITHMETIC[amount.word]} {right}")

    def aggregate(self, amount: Aggregate) -> str:
        members, year = self.set(amount.set), amount.word.endswith("year")

        def where(s: str, o: str) -> str:
            whole = f"{o}.number = toInteger({o}.number)"
            return f"{s} IN {members} AND " + (
                f"({o}.date IS NOT NULL OR {whole})" if year else f"{o}.number IS NOT NULL"
            )

        of_year = "CASE WHEN {o}.date IS NULL THEN toInteger({o}.number) ELSE toInteger(left({o}.date, 4)) END"
        each, match = self.match(amount.relation, where, f"{{s}}, {of_year if year else '{o}.number'} AS each")
        functions = {"sum": "CASE WHEN count(each) = 0 THEN null ELSE sum(each) END", "average": "avg(each)"}
        most = "max(each)" if amount.word in ("largest", "latest year") else "min(each)"
        return self.step(functions.get(amount.word, most), f"{match} WITH DISTINCT {', '.join([*self.names, each])}")
