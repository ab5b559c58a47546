"""Random graphs and programs for the tests of the language, and an RDF store as the oracle."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from decimal import Decimal
from random import Random
from typing import Any, TypeVar

import pyoxigraph
from hypothesis import strategies as st

from moesaic.know.language import program as p
from moesaic.know.language.execute import Facts
from moesaic.know.language.program import Program, Result
from moesaic.know.language.sparql import thing_of, to_ntriples, to_sparql
from moesaic.know.language.values import Value, number, order

T = TypeVar("T")
Choose = Callable[[Sequence[T]], T]

RELATIONS = ("in", "knows", "born in", "size")
QUALIFIERS = ("since", "by")
DATES = ("1950-02-28", "1999-12-31", "2000-02-29")
NUMBERS = ("0", "5", "-3", "2.5", "40", "12.25", "5.0")
NAMES = ("Ada", "Bo", "Cy", "Dora Lind", "E")
# What ends strings, IRIs and brackets in one of the languages, or is turned into such by it.
HARD = (
    "a'b",
    'a"b',
    "a\\",
    "\\u0022",
    "\\u0027) //",
    "<a>",
    "[b]",
    "x\ny",
    "{} ?v1 }",
    "$p0 `q`",
    "naïve 東京 🙂",
    "%5D%20",
    "a\r\tb",
)


@st.composite
def graphs(draw: st.DrawFn, names: Sequence[str] = NAMES) -> list[Any]:
    thing = st.sampled_from(names)
    value = st.one_of(thing, st.sampled_from(NUMBERS), st.sampled_from(DATES))
    said: st.SearchStrategy[Any] = st.one_of(
        st.just({}), st.dictionaries(st.sampled_from(QUALIFIERS), value, max_size=2)
    )
    fact = st.tuples(thing, st.sampled_from(RELATIONS), value, said)
    return draw(st.lists(fact, max_size=24))


def random_graph(random: Random, names: Sequence[str]) -> list[Any]:
    def value() -> str:
        return random.choice((random.choice(names), random.choice(NUMBERS), random.choice(DATES)))

    def fact() -> Any:
        said = {name: value() for name in QUALIFIERS if random.random() < 0.3}
        return random.choice(names), random.choice(RELATIONS), value(), said

    return [fact() for _ in range(random.randrange(30))]


@st.composite
def programs(draw: st.DrawFn, names: Sequence[str] = NAMES, depth: int = 3) -> Program:
    return Maker(lambda options: draw(st.sampled_from(options)), names).program(depth)


class Maker:
    def __init__(self, choose: Choose[Any], names: Sequence[str]) -> None:
        self.choose, self.names = choose, names

    def program(self, depth: int) -> Program:
        kind = self.choose(("what", "what", "many", "any", "compute", "compare"))
        if kind == "what":
            return p.What(self.set(depth))
        if kind == "many":
            return p.HowMany(self.set(depth))
        if kind == "any":
            return p.IsThere(self.set(depth))
        if kind == "compute":
            return p.Compute(self.amount(depth - 1))
        return p.IsAmount(self.amount(depth - 1), self.choose(tuple(p.COMPARED)), self.amount(depth - 1))

    def number(self) -> Any:
        return number(Decimal(self.choose(NUMBERS)))

    def date(self) -> datetime.date:
        return datetime.date.fromisoformat(self.choose(DATES))

    def compared(self) -> p.Compared:
        if self.choose((True, False)):
            return p.Compared(self.choose(tuple(p.COMPARED)), self.number())
        return p.Compared(self.choose(tuple(p.DATED)), self.date())

    def relation(self) -> p.Relation:
        name = self.choose(RELATIONS)
        if self.choose((True, False, False)):
            one = p.Name(self.choose(self.names)) if self.choose((True, False)) else p.Literal(self.number())
            test = p.Is(one) if self.choose((True, False)) else self.compared()
            return p.Relation(name, p.Qualifier(self.choose(QUALIFIERS), test))
        return p.Relation(name)

    def set(self, depth: int) -> p.Set:
        simple = ("name", "name", "name", "number", "date", "everything")
        kind = self.choose(
            simple if depth <= 0 else ("of", "whose", "whose", "join", "join", "extreme", "like", "name")
        )
        if kind == "name":
            return p.Name(self.choose(self.names))
        if kind == "number":
            return p.Literal(self.number())
        if kind == "date":
            return p.Literal(self.date())
        if kind == "everything":
            return p.Everything()
        if kind == "of":
            return p.Of(self.relation(), self.set(depth - 1))
        if kind == "whose":
            test = self.choose(("is", "known", "compared"))
            if test == "is":
                return p.Whose(self.relation(), p.Is(self.set(depth - 1)))
            return p.Whose(self.relation(), p.Known() if test == "known" else self.compared())
        if kind == "join":
            return p.Joined(self.set(depth - 1), self.choose(("and", "or", "but not")), self.set(depth - 1))
        if kind == "extreme":
            return p.Extreme(self.set(depth - 1), self.choose(p.EXTREMES), self.relation())
        return p.NamedLike(self.set(depth - 1), self.choose(("a", "\\", "\\u", '"', "", "A", *self.names)))

    def amount(self, depth: int) -> p.Amount:
        kind = self.choose(("number of", "aggregate", "aggregate", "constant", *(("arithmetic",) if depth > 0 else ())))
        if kind == "number of":
            return p.NumberOf(self.set(depth))
        if kind == "aggregate":
            return p.Aggregate(self.choose(p.AGGREGATES), self.relation(), self.set(depth))
        if kind == "constant":
            return p.Constant(self.number())
        return p.Arithmetic(self.amount(depth - 1), self.choose(tuple(p.ARITHMETIC)), self.amount(depth - 1))


def store_of(facts: Facts) -> pyoxigraph.Store:
    store = pyoxigraph.Store()
    store.load("\n".join(to_ntriples(facts)).encode(), format=pyoxigraph.RdfFormat.N_TRIPLES)
    return store


def oracle(program: Program, store: pyoxigraph.Store) -> Result:
    """What the RDF store makes of the program's SPARQL."""
    found = store.query(to_sparql(program))
    if isinstance(found, pyoxigraph.QueryBoolean):
        return bool(found)
    answers = [solution["answer"] for solution in found]
    if isinstance(program, p.What):
        return sorted((value_of(answer) for answer in answers), key=order)
    assert len(answers) <= 1
    if not answers or answers[0] is None:
        return None
    if isinstance(program, p.IsAmount):
        return bool(answers[0].value == "true")
    found_value = value_of(answers[0])
    assert isinstance(found_value, int | Decimal)
    return found_value


def value_of(term: Any) -> Value:
    if isinstance(term, pyoxigraph.NamedNode):
        return thing_of(term.value)
    if term.datatype.value.endswith("#date"):
        return datetime.date.fromisoformat(term.value)
    return number(Decimal(term.value))
