"""Answers have the form that was asked for, whatever the model would rather say."""

from __future__ import annotations

import json
import re

import pytest

import moesaic
from moesaic.errors import UserError
from moesaic.serve.core.grammar import Grammar
from tests.serve.made import talking_model

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "values": {
            "type": "array",
            "items": {"type": "integer", "minimum": 0, "maximum": 99},
            "minItems": 1,
            "maxItems": 3,
        },
        "fine": {"type": "boolean"},
    },
    "required": ["name", "values", "fine"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory) -> moesaic.Engine:
    return moesaic.Engine(moesaic.load(talking_model(tmp_path_factory.mktemp("model"))))


@pytest.mark.parametrize("temperature", [0.0, 1.0, 2.0])
def test_json_satisfies_its_schema(engine, temperature):
    answers = engine.generate(
        ["Answer:", "The number"], n=4, max_tokens=150, temperature=temperature, seed=1, grammar=Grammar.json(SCHEMA)
    )
    for answer in answers:
        assert answer.finish_reason == "stop"
        found = json.loads(answer.text)
        assert set(found) == {"name", "values", "fine"}
        assert isinstance(found["name"], str) and len(found["name"]) <= 5
        assert 1 <= len(found["values"]) <= 3 and all(0 <= value <= 99 for value in found["values"])
        assert isinstance(found["fine"], bool)


def test_the_answers_differ_so_the_model_still_chooses(engine):
    answers = engine.generate(["Answer:"], n=8, max_tokens=150, temperature=1.0, seed=2, grammar=Grammar.json(SCHEMA))
    assert len({answer.text for answer in answers}) > 4


def test_regex_choice_and_grammar(engine):
    for answer in engine.generate(["x"], n=5, max_tokens=40, grammar=Grammar.regex(r"[a-c]{3}-[0-9]{2}")):
        assert re.fullmatch(r"[a-c]{3}-[0-9]{2}", answer.text)
    found = {
        a.text for a in engine.generate(["x"], n=20, max_tokens=40, grammar=Grammar.choice(["yes", "no", 'a "b"\n']))
    }
    assert found <= {"yes", "no", 'a "b"\n'} and len(found) > 1
    lark = 'start: "(" item ("," item)* ")"\nitem: /[0-9]/'
    for answer in engine.generate(["x"], n=5, max_tokens=200, grammar=Grammar.lark(lark)):
        if answer.finish_reason == "stop":
            assert re.fullmatch(r"\([0-9](,[0-9])*\)", answer.text)


def test_neighbours_are_free(engine):
    free = engine.generate(["Answer:"], max_tokens=10, temperature=0.0)[0].text
    from moesaic.serve.core.request import Sampling

    bound = engine.request("Answer:", Sampling(max_tokens=60, temperature=0.0, grammar=Grammar.json(SCHEMA)))
    beside = engine.request("Answer:", Sampling(max_tokens=10, temperature=0.0))
    said = ""
    for request in (bound, beside):
        engine.add(request)
    while engine.working:
        said += "".join(output.text for output in engine.step() if output.request is beside)
    assert said == free


@pytest.mark.parametrize(
    "make",
    [
        lambda: Grammar.regex("[a"),
        lambda: Grammar.lark("start: nothing_such"),
        lambda: Grammar.json({"type": "no such type"}),
        lambda: Grammar.json({"$ref": "#/nowhere"}),
        lambda: Grammar.choice([]),
    ],
)
def test_a_grammar_that_cannot_be_followed_is_refused(make):
    with pytest.raises(UserError):
        make()
