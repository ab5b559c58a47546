"""Programs mean what an RDF store makes of their SPARQL, whatever the names in them."""

from __future__ import annotations

from decimal import Decimal
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from moesaic.data.tasks.multihop import UNKNOWN, world
from moesaic.know.language.execute import Facts, answer_text, execute
from moesaic.know.language.parse import parse
from moesaic.know.language.program import Name, Of, Program, Relation, Result, What
from tests.know.language.made import HARD, NAMES, Maker, graphs, oracle, programs, random_graph, store_of

# Without shrinking: a program that fails is small enough to read, and shrinking five of them takes minutes.
QUICK = settings(
    deadline=None, max_examples=60, suppress_health_check=list(HealthCheck), phases=[Phase.explicit, Phase.generate]
)


def same(ours: Result, theirs: Result) -> bool:
    """Equal, but for the last digits of a quotient."""
    if isinstance(ours, Decimal | int) and isinstance(theirs, Decimal | int) and not isinstance(ours, bool):
        return abs(Decimal(ours) - Decimal(theirs)) <= Decimal("1e-12") * (1 + abs(Decimal(ours)))
    return ours == theirs and type(ours) is type(theirs)


def test_thousands_of_results_are_the_oracles() -> None:
    informative = 0
    for seed in range(200):
        random = Random(seed)
        names = random.choice((NAMES, HARD))
        facts = Facts.of(random_graph(random, names))
        store = store_of(facts)
        for _ in range(10):
            program = Maker(random.choice, names).program(random.choice((1, 2, 3, 4)))
            found = execute(program, facts)
            assert same(found, oracle(program, store)), str(program)
            informative += found not in ([], None, 0, False)
    assert informative > 400


@QUICK
@given(graphs(), st.lists(programs(), min_size=5, max_size=5))
def test_results_are_the_oracles(triples: list[Any], several: list[Program]) -> None:
    facts = Facts.of(triples)
    store = store_of(facts)
    for program in several:
        assert same(execute(program, facts), oracle(program, store)), str(program)


@settings(QUICK, max_examples=30)
@given(graphs(HARD), st.lists(programs(HARD, depth=2), min_size=4, max_size=4))
def test_no_name_breaks_out(triples: list[Any], several: list[Program]) -> None:
    facts = Facts.of(triples)
    store = store_of(facts)
    for program in several:
        assert same(execute(program, facts), oracle(program, store)), str(program)
        assert parse(str(program)) == program


@settings(QUICK, max_examples=100)
@given(
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1),
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1),
)
def test_any_text_can_be_a_name(name: str, relation: str) -> None:
    facts = Facts.of([(name, relation, "it")])
    program = What(Of(Relation(relation), Name(name)))
    assert parse(str(program)) == program
    assert execute(program, facts) == oracle(program, store_of(facts)) == ["it"]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("years_only", [False, True])
def test_worlds_programs_give_their_answers(seed: int, years_only: bool) -> None:
    made = world(seed, people=14, hops=(1, 2, 3, 4), years_only=years_only)
    facts = Facts.of(made.triples)
    store = store_of(facts)
    for question in made.questions:
        program = parse(question.program)
        assert str(program) == question.program
        found = execute(program, facts)
        assert answer_text(found) in (question.answer, *question.aliases), question
        assert same(found, oracle(program, store))
        assert (found in ([], None)) == (question.answer == UNKNOWN)
