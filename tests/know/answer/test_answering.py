"""Answers with citations: chosen passages, forms, checked citations with quotes, follow-up questions, abstention."""

from __future__ import annotations

import json

import llguidance
import pytest

from moesaic.cli.know_ask import show_answer
from moesaic.know.answer.answer import NOT_IN_TEXTS
from moesaic.know.answer.answering import Answerer, quotes, short_text
from moesaic.know.answer.choose import choose
from moesaic.know.answer.citations import check_answer, read_statements
from moesaic.know.answer.follow_up import FollowUp, read_queries
from moesaic.know.answer.prompts import citing_form
from moesaic.know.answer.writers import grammar_of
from moesaic.know.chunk import Hit
from tests.know.answer.scripted import Scripted, Shelf, chunk

CURIE = "Marie Curie discovered radium in 1898. She was born in Warsaw. She won two Nobel Prizes."
LISE = "Lise Meitner explained nuclear fission in 1939. She was born in Vienna. She never won a Nobel Prize."
SHELF = Shelf(("Marie Curie", CURIE), ("Lise Meitner", LISE), ("Radium", "Radium is a chemical element. It is rare."))


def ask(question: str, *written: str, shelf: Shelf = SHELF):
    return Answerer(shelf, Scripted(*written)).answer(question)


def test_true_citations_are_kept_with_an_exact_quote_of_the_document() -> None:
    answer = ask("Where was Marie Curie born?", "Marie Curie was born in Warsaw [1].")
    (citation,) = answer.citations
    assert answer.text == "Marie Curie was born in Warsaw [1]." and not answer.dropped
    assert citation.quote == CURIE[citation.start : citation.end] == "She was born in Warsaw."
    assert (citation.source, citation.title, citation.chunk) == ("Marie Curie.txt", "Marie Curie", "Marie Curie-0")
    record = json.loads(json.dumps(answer.record()))
    assert record["citations"][0]["quote"] == citation.quote and record["abstained"] is False


def test_a_wrong_citation_moves_to_the_passage_that_has_it() -> None:
    question = "Where was Marie Curie born and what is radium?"
    numbers = {p.chunk.title: p.number for p in ask(question, NOT_IN_TEXTS).passages}
    wrong, right = numbers["Radium"], numbers["Marie Curie"]
    answer = ask(question, f"Marie Curie was born in Warsaw [{wrong}].")
    assert [c.number for c in answer.citations] == [right] == [d.moved_to for d in answer.dropped]
    assert "name not there" in answer.dropped[0].reason


@pytest.mark.parametrize(
    "statement",
    [
        "Marie Curie was born in Vienna",
        "Marie Curie discovered radium in 1899",
        "Marie Curie did not discover radium",
        "Lise Meitner won a Nobel Prize",
        "Radium discovered Marie Curie in 1898",
    ],
)
def test_an_unsupported_sentence_is_marked_beside_a_true_one(statement: str) -> None:
    answer = ask("Where was Marie Curie born?", f"Marie Curie was born in Warsaw [1]. {statement} [1][2].")
    assert answer.unsupported == [f"{statement}."] and "[unsupported]" in answer.text
    assert {d.number for d in answer.dropped} <= {1, 2, 3} and all(d.reason for d in answer.dropped)
    assert not answer.abstained and len(answer.citations) == 1


def test_a_statement_of_two_passages_cites_both() -> None:
    answer = ask(
        "Who of Marie Curie and Lise Meitner was born in Vienna?",
        "Marie Curie was born in Warsaw, and Lise Meitner was born in Vienna [1][2].",
    )
    assert {c.title: c.quote for c in answer.citations} == {
        "Marie Curie": "She was born in Warsaw.",
        "Lise Meitner": "She was born in Vienna.",
    }


def test_numbers_that_do_not_exist_are_dropped() -> None:
    answer = ask("Where was Marie Curie born?", "Marie Curie was born in Warsaw [9].")
    assert [d.reason for d in answer.dropped] == ["there is no such passage"] and len(answer.citations) == 1


@pytest.mark.parametrize(
    ("question", "written", "why"),
    [
        ("Where was Marie Curie born?", NOT_IN_TEXTS, "did not find"),
        ("Where was Marie Curie born?", "Marie Curie was born in Lyon [1].", "no passage supports"),
        ("How tall is Mount Kenya in Africa?", "unused", "nothing that was found is about Mount, Kenya"),
        ("zzz qqq", "unused", "nothing was found"),
    ],
)
def test_what_is_not_in_the_texts_is_not_answered(question: str, written: str, why: str) -> None:
    answer = ask(question, written, shelf=SHELF)
    assert answer.abstained and answer.text == NOT_IN_TEXTS and why in (answer.why_not or "")
    assert answer.record()["citations"] == []


def test_what_was_read_in_vain_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    show_answer(ask("Where was Marie Curie born?", "Marie Curie was born in Lyon [1]."))
    shown = capsys.readouterr().out
    assert "no passage supports" in shown and "read: Marie Curie.txt: “" in shown and "born in Warsaw" in shown
    assert "Lyon" not in shown


def test_statements_are_read_with_their_numbers() -> None:
    text = "Mr. Fox is red. [1] He eats hens [2][3]. He sleeps. And dreams [1, 3]!"
    assert read_statements(text) == [
        ("Mr. Fox is red.", [1]),
        ("He eats hens.", [2, 3]),
        ("He sleeps.", []),
        ("And dreams!", [1, 3]),
    ]
    assert read_statements(" [1] . ") == []


def test_passages_are_few_new_cut_and_fit() -> None:
    long = "The fox lives in a den. " + "Many unrelated words stand in this long sentence of no use. " * 30
    texts = [
        long + "The den of the fox is warm.",
        long + "The den of the fox is warm!",
        "A den is a hole. The fox digs.",
    ]
    hits = [Hit(chunk(f"t{n}", text), n, 1.0) for n, text in enumerate(texts)]
    chosen = choose("How warm is the den of the fox?", hits)
    assert [p.chunk.title for p in chosen] == ["t0", "t2"] and [p.number for p in chosen] == [1, 2]
    assert "The den of the fox is warm." in chosen[0].shown and len(chosen[0].shown.split()) < 120
    fitting = choose("fox den", hits, fits=lambda passages: sum(len(p.shown) for p in passages) <= 60)
    assert sum(len(p.shown) for p in fitting) <= 60 and fitting[0].chunk.title == "t0"


def test_the_form_has_no_numbers_but_those_of_passages() -> None:
    grammar = grammar_of(citing_form(2))
    assert grammar is not None
    tokens = llguidance.LLTokenizer("byte")

    def fits(text: str) -> bool:
        matcher = llguidance.LLMatcher(tokens, grammar.text)
        return bool(matcher.consume_tokens(tokens.tokenize_str(text)) and matcher.is_accepting())

    assert fits("Curie was born in Warsaw [1][2]. She won it [2].") and fits(NOT_IN_TEXTS)
    assert not fits("Curie was born in Warsaw [3].") and not fits("Curie was born in Warsaw.") and not fits("[1].")


def test_a_quoted_answer_is_a_sentence_of_the_passages() -> None:
    writer = Scripted("She was born in Warsaw. [1]")
    answer = Answerer(SHELF, writer, quote=True).answer("Where was Marie Curie born?")
    assert answer.text == "She was born in Warsaw [1]." and answer.citations[0].quote == "She was born in Warsaw."
    grammar = grammar_of(writer.forms[0])
    assert grammar is not None
    tokens = llguidance.LLTokenizer("byte")
    for text, fits in (
        ("She was born in Warsaw. [1]", True),
        (NOT_IN_TEXTS, True),
        ("She was born in Warsaw. [2]", False),
        ("She was born in Rome. [1]", False),
    ):
        matcher = llguidance.LLMatcher(tokens, grammar.text)
        assert bool(matcher.consume_tokens(tokens.tokenize_str(text)) and matcher.is_accepting()) == fits


def test_follow_up_questions_are_answered_and_lead_on() -> None:
    shelf = Shelf(
        ("Gold Harvest", "Gold Harvest is a film that Anna Ortiz directed."),
        ("Anna Ortiz", "Anna Ortiz was born in Quito. She directs films."),
        ("Quito", "Quito is a city in Ecuador."),
    )
    writer = Scripted(
        '{"queries": ["Who directed Gold Harvest?"]}',
        '{"answer": "Anna Ortiz"}',
        '{"queries": ["Who directed Gold Harvest?", "Where was Anna Ortiz born?"]}',
        '{"answer": "Quito"}',
        "Anna Ortiz was born in Quito [2].",
    )
    answer = FollowUp(Answerer(shelf, writer), rounds=2).answer("Where was the director of Gold Harvest born?")
    assert [(r.number, r.query, r.answer) for r in answer.rounds] == [
        (1, "Who directed Gold Harvest?", "Anna Ortiz"),
        (2, "Where was Anna Ortiz born?", "Quito"),  # what was asked before is not asked again
    ]
    assert "Found: Anna Ortiz" in writer.asked[2][1]["content"] and "Found: Quito" in writer.asked[4][1]["content"]
    assert [c.title for c in answer.citations] == ["Anna Ortiz"] and not answer.abstained
    assert [bool(form and form.schema) for form in writer.forms] == [True, True, True, True, False]


def test_broken_forms_end_the_rounds_and_not_the_answer() -> None:
    answer = FollowUp(Answerer(SHELF, Scripted('{"queries": ["Wh', "Marie Curie was born in Warsaw [1]."))).answer(
        "Where was Marie Curie born?"
    )
    assert not answer.rounds and answer.text == "Marie Curie was born in Warsaw [1]."
    assert read_queries("- Who is the king of Spain?\n- x") == ["Who is the king of Spain?"]
    assert read_queries('{"queries": 3}') == [] == read_queries("[1, 2]")
    assert [short_text(t) for t in ('{"answer": "Rome"}', '{"answer": "Ro', "Rome\nbecause")] == ["Rome", "Ro", "Rome"]


def test_without_a_model_there_are_quotes() -> None:
    found = quotes("Where was Marie Curie born?", SHELF.search("Where was Marie Curie born?"))
    passage, quote, start, end = found[0]
    assert quote == "She was born in Warsaw." == passage.chunk.text[start:end]


def test_checking_takes_what_was_cited_by_anyone() -> None:
    passages = choose("radium", SHELF.search("Marie Curie radium"))
    kept = check_answer("Marie Curie discovered radium.", passages)
    assert kept[0].supported and kept[0].citations[0].title == "Marie Curie"
