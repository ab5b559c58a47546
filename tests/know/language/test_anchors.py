"""Semantic anchors: what questions mention is found, learned from pairs, and all that a program can then be about."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from llguidance import LLMatcher, LLTokenizer

from moesaic.data.tasks.multihop import world
from moesaic.know.language.anchors import Anchors, Lexicon, Names, anchors_of
from moesaic.know.language.examples import STYLES, Style, asked, examples, target, write
from moesaic.know.language.execute import Facts


def test_the_longest_name_is_found_as_whole_words() -> None:
    names = Names(["Ann", "Ann Lee", "Lee", "St. Anne", "Lee & Co."])
    assert [name for *_, name in names.places("Is ann lee of Lee & Co. the Ann of St. Anne, or Leeds?")] == [
        "Ann Lee", "Lee & Co.", "Ann", "St. Anne",
    ]  # fmt: skip
    assert names.without("Ann Lee met Ann.") == "# met #."


def test_anchors_of_a_program() -> None:
    found = anchors_of("what is ( <born> of [A \\] b] or <born> of <spouse> of [C] )")
    assert (found.names, found.relations) == (("A ] b", "C"), ("born", "spouse"))
    assert str(found) == "[A \\] b] [C] <born> <spouse>"


def test_relations_are_learned_from_pairs() -> None:
    """In worlds that share no name with those it learned from, it finds all that a program needs, and little more."""
    pairs = []
    for seed in range(30):
        made = world(seed)
        names = Names(Facts.of(made.triples).names)
        pairs += [(names.without(question.text), question.program) for question in made.questions]
    lexicon = Lexicon.learn(pairs)
    complete, more, count = 0, 0, 0
    for seed in range(5):
        made = world(seed, split="test")
        facts = Facts.of(made.triples)
        finder = Anchors(facts.names, facts.relations, lexicon)
        for question in made.questions:
            needed, found = anchors_of(question.program), finder.find(question.text)
            assert set(needed.names) <= set(found.names)
            complete += set(needed.relations) <= set(found.relations)
            more += len(set(found.relations) - set(needed.relations))
            count += 1
    assert complete >= 0.99 * count
    assert more <= 2 * count


@pytest.mark.parametrize("style", STYLES)
def test_examples_are_what_the_question_s_grammar_takes(style: Style) -> None:
    made = world(3, split="test", questions=1)
    facts = Facts.of(made.triples)
    finder = Anchors(facts.names, facts.relations)
    for question in made.questions:
        about = asked(question.text, finder)
        text = target(question, style)
        matcher = LLMatcher(
            LLTokenizer("byte"),
            LLMatcher.grammar_from_lark(about.grammar(anchors_of(question.program).relations, style)),
        )
        assert matcher.try_consume_tokens(list(text.encode())) == len(text.encode())
        assert matcher.is_accepting()
        assert about.program(text, style) == question.program


def test_examples_are_conversations(tmp_path: Path) -> None:
    count = write(tmp_path / "a.jsonl", range(2), "anchors", people=8)
    lines = (tmp_path / "a.jsonl").read_text().splitlines()
    assert len(lines) == count > 50
    assert json.loads(lines[0]) == next(iter(examples([0], "anchors", people=8)))
    assert " => " in json.loads(lines[0])["messages"][1]["content"]
