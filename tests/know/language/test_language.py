"""The language itself: its parser and its errors, its grammar, and the form of its Cypher."""

from __future__ import annotations

import re
from random import Random

import pytest
from llguidance import LLMatcher, LLTokenizer

from moesaic.know.language.cypher import to_cypher, to_statements
from moesaic.know.language.execute import Facts, answer_text, execute
from moesaic.know.language.grammar import grammar
from moesaic.know.language.parse import NotAProgram, parse
from moesaic.know.language.program import Name, Of, Relation, What
from moesaic.serve.core.grammar import Grammar
from tests.know.language.made import HARD, NAMES, RELATIONS, Maker

FACTS = Facts.of(
    [
        ("Ada", "employer", "Acme", {"since": "1990"}),
        ("Bo", "employer", "Acme", {"since": "2001"}),
        ("Ada", "born", "1950-01-02"),
        ("Bo", "born", "1961"),
        ("Acme", "staff", "120"),
        ("Zeta", "staff", "2.50"),
    ]
)


@pytest.mark.parametrize(
    ("program", "answer"),
    [
        ("what is <employer> of [Ada]", "Acme"),
        ("what is those whose <employer> where <since> above 1995 is [Acme]", "Bo"),
        ("how many are those whose <employer> is [Acme]", "2"),
        ("is there any ( [Ada] and those whose <employer> is known )", "yes"),
        ("what is ( ( [Acme] or [Zeta] ) with the smallest <staff> )", "Zeta"),
        ("what is those whose <born> before 1960-01-01", "Ada"),
        ("compute ( the latest year <born> of [Bo] minus the latest year <born> of [Ada] )", "11"),
        ("compute the average <staff> of ( [Acme] or [Zeta] )", "61.25"),
        ("compute the sum <staff> of [Ada]", "unknown"),
        ("is the number of everything above 3", "yes"),
        ("what is ( everything named like \"et\" )", "Zeta"),
        ("what is those whose <staff> is 2.5", "Zeta"),
        ("compute ( 1 divided by 0 )", "unknown"),
    ],
)  # fmt: skip
def test_what_programs_mean(program: str, answer: str) -> None:
    parsed = parse(program)
    assert str(parsed) == program
    assert answer_text(execute(parsed, FACTS)) == answer


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "at the end"),
        ("drop everything", "'drop everything'"),
        ("what is [Ada", "cannot be read"),
        ("what is <born> [Ada]", "\"of\" is missing before '[Ada]'"),
        ("what is [Ada] [Bo]", "the end of the program"),
        ("what is those whose <born> before 5", "for dates"),
        ("what is those whose <born> above 1950-01-01", "for numbers"),
        ("what is 1950-13-01", "neither a number nor a date"),
        ("what is " + "( " * 500 + "[a]", "parts within each other"),
    ],
)
def test_what_is_wrong_is_said(text: str, said: str) -> None:
    with pytest.raises(NotAProgram, match=re.escape(said)):
        parse(text)


def accepts(rules: str, text: str) -> bool:
    matcher = LLMatcher(LLTokenizer("byte"), LLMatcher.grammar_from_lark(rules))
    tokens = list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def test_the_grammar_takes_every_program() -> None:
    random, rules = Random(0), grammar()
    for _ in range(60):
        assert accepts(rules, str(Maker(random.choice, random.choice((NAMES, HARD))).program(3)))
    for wrong in ("what is", "what is [a", "what is <r> [a]", "what is  [a]", "what is [a] ", "is there [a]"):
        assert not accepts(rules, wrong)


def test_a_question_s_grammar_has_its_names_only() -> None:
    rules = grammar(HARD[:4], RELATIONS[:2])
    Grammar.lark(rules)
    random = Random(1)
    for _ in range(20):
        program = Maker(random.choice, HARD[:4]).program(2)
        assert accepts(rules, str(program)) == (set(re.findall("<([a-z ]+)>", str(program))) <= {"in", "knows"})
    assert not accepts(rules, "what is [Ada]")
    assert not accepts(grammar(["Ada"], ["in"], simple=True), "what is everything")
    assert not accepts(grammar([], ["in"]), "what is []")


def test_cypher_is_one_step_a_line() -> None:
    query = to_cypher(parse("what is ( those whose <born in> is <base> of [O'Neil] with the latest <born> )"))
    assert query.text.splitlines() == [
        "OPTIONAL MATCH (x1:Thing {name: $p0}) WITH collect(DISTINCT x1) AS s1",
        "OPTIONAL MATCH (x2:Thing)-[f2:FACT {relation: $p1}]->(y2) WHERE x2 IN s1 WITH s1, collect(DISTINCT y2) AS s2",
        "OPTIONAL MATCH (x3:Thing)-[f3:FACT {relation: $p2}]->(y3) WHERE y3 IN s2 "
        "WITH s1, s2, collect(DISTINCT x3) AS s3",
        "OPTIONAL MATCH (x4:Thing)-[f4:FACT {relation: $p3}]->(y4) WHERE x4 IN s3 AND y4.date IS NOT NULL "
        "WITH s1, s2, s3, max(y4.date) AS s4",
        "OPTIONAL MATCH (x5:Thing)-[f5:FACT {relation: $p4}]->(y5) WHERE x5 IN s3 AND y5.date = s4 "
        "WITH s1, s2, s3, s4, collect(DISTINCT x5) AS s5",
        "UNWIND s5 AS a RETURN DISTINCT coalesce(a.name, a.date, a.number) AS answer",
    ]
    assert list(query.parameters.values()) == ["O'Neil", "base", "born in", "born", "born"]
    assert "{name: 'O\\'Neil'}" in query.inline()


STRING = re.compile(r"'((?:[^'\\]|\\.)*)'", re.S)


def unescaped(text: str) -> str:
    """As Cypher reads strings; an escape by number, which older servers read first, must not be there."""
    assert not re.search(r"\\[uU]", text)
    plain = {"n": "\n", "r": "\r", "t": "\t"}
    return re.sub(r"\\(.)", lambda match: plain.get(match[1], match[1]), text, flags=re.S)


@pytest.mark.parametrize("name", HARD)
def test_no_name_changes_the_form_of_cypher(name: str) -> None:
    """Without its strings the text is the same as with a harmless name, and its strings are the names."""
    inline = to_cypher(What(Of(Relation(name), Name(name)))).inline()
    harmless = to_cypher(What(Of(Relation("r"), Name("n")))).inline()
    assert STRING.sub("''", inline).replace("'' + ''", "''") == STRING.sub("''", harmless)
    assert "".join(unescaped(part) for part in STRING.findall(inline)) == name + name
    loaded = next(iter(to_statements(Facts.of([(name, name, name, {name: "5"})])))).inline()
    assert "".join(unescaped(part) for part in STRING.findall(loaded)) == name * 3
