"""JSON by a schema: objects have the keys their schema names and no others, and none twice, also where the model
chooses them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from llguidance import LLMatcher, LLTokenizer

import moesaic
from moesaic.errors import UserError
from moesaic.serve.core.grammar import Grammar
from moesaic.serve.core.grammars.json_schema import closed
from moesaic.serve.core.grammars.unique_keys import KeyReader, QuoteTokens
from tests.serve.made import talking_model

BYTES = LLTokenizer("byte")
INTEGER = {"type": "integer"}


def accepts(schema: Any, text: str) -> bool:
    matcher = LLMatcher(BYTES, Grammar.json(schema).text, log_level=0)
    tokens = list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def an_object(*names: str, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": dict.fromkeys(names, INTEGER), **more}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (an_object("a"), ['{"a":1}', "{}"], ['{"b":1}', '{"a":1,"b":1}']),
        (an_object(), ["{}"], ['{"a":1}']),
        ({"type": "object"}, ['{"a":1}', "{}"], ["1"]),
        ({"properties": {"a": INTEGER}}, ['{"a":1}'], ['"a"', "1"]),
        (an_object("a", additionalProperties=True), ['{"a":1,"b":"x"}'], ['{"a":"x"}']),
        (an_object("a", additionalProperties=INTEGER), ['{"a":1,"b":2}'], ['{"a":1,"b":"x"}']),
        (an_object("a", unevaluatedProperties=False), ['{"a":1}'], ['{"b":1}']),
        (an_object("a", patternProperties={"^x": INTEGER}), ['{"a":1,"xy":2}'], ['{"y":1}']),
        (an_object("a", required=["a", "b"]), ['{"a":1,"b":[]}'], ['{"a":1}', '{"a":1,"b":1,"c":1}']),
        (
            {"type": "object", "propertyNames": {"enum": ["p"]}, "additionalProperties": INTEGER},
            ['{"p":1}'],
            ['{"q":1}'],
        ),
        (
            {"allOf": [an_object("a", required=["a"]), an_object("b", required=["b"])]},
            ['{"a":1,"b":2}'],
            ['{"a":1}', '{"a":1,"b":2,"c":3}'],
        ),
        ({"allOf": [an_object("a"), {"additionalProperties": INTEGER}]}, ['{"a":1,"z":2}'], ['{"z":"x"}']),
        (
            an_object("k", required=["k"], anyOf=[{"properties": {"x": INTEGER}}, {"properties": {"y": INTEGER}}]),
            ['{"k":1,"x":2}', '{"k":1,"y":2}', '{"k":1}'],
            ['{"k":1,"x":1,"y":2}', '{"k":1,"z":1}'],
        ),
        (
            an_object("a", "b", anyOf=[{"required": ["a"]}, {"required": ["b"]}]),
            ['{"a":1}', '{"b":1}', '{"a":1,"b":2}'],
            ["{}", '{"a":1,"c":1}'],
        ),
        (
            {"$ref": "#/$defs/n", "$defs": {"n": {"properties": {"v": INTEGER, "n": {"$ref": "#/$defs/n"}}}}},
            ['{"v":1,"n":{"v":2}}'],
            ['{"v":1,"n":{"w":2}}', '{"w":1}'],
        ),
        (
            {
                "allOf": [{"$ref": "#/$defs/A"}, an_object("b")],
                "$defs": {"A": {"properties": {"n": {"$ref": "#/$defs/A"}}}},
            },
            ['{"n":{"n":{}},"b":1}', '{"b":1}'],
            ['{"n":{"b":1}}', '{"c":1}'],
        ),
        ({"$ref": "#/$defs/A", **an_object("z"), "$defs": {"A": an_object("a")}}, ['{"z":2,"a":1}', "{}"], ['{"c":1}']),
        ({"oneOf": [INTEGER, {"type": "number"}]}, ["1", "1.5"], ['"x"']),
        ({"type": "string", "format": "password"}, ['"x"'], ["1"]),
        ({"type": "string", "format": "date"}, ['"2024-02-29"'], ['"x"']),
    ],
)
def test_which_keys_an_object_has(schema: Any, good: list[str], bad: list[str]) -> None:
    assert [text for text in good if not accepts(schema, text)] == []
    assert [text for text in bad if accepts(schema, text)] == []


def test_whether_keys_are_the_models_choice_is_known() -> None:
    assert not closed(an_object("a"), "x").open
    assert not closed({"type": "array", "items": {"$ref": "#/$defs/a"}, "$defs": {"a": an_object("b")}}, "x").open
    for schema in ({"type": "object"}, {}, True, an_object("a", additionalProperties=True), {"items": {}}):
        assert closed(schema, "x").open


@pytest.mark.parametrize("word", ["not", "if", "contains", "uniqueItems", "dependentRequired"])
def test_a_keyword_that_is_not_followed_is_named(word: str) -> None:
    value = {"uniqueItems": True, "dependentRequired": {"a": ["b"]}}.get(word, {"const": 1})
    with pytest.raises(UserError, match=word):
        Grammar.json({**an_object("a"), word: value})


@pytest.mark.parametrize(
    ("written", "token", "repeats"),
    [
        ('{"a":1,"', 'a"', True),
        ('{"a":1,"', 'ab"', False),
        ('{"a":1,"a', '"', True),
        ('{"a":1,"a', 'b"', False),
        ('{"a":1,"b":{"', 'a"', False),
        ('{"a":{"b":1},"', 'a":', True),
        ('{"a":1', ',"a"', True),
        ('[{"a":1},{"', 'a"', False),
        ('{"a":"x","b":"', 'a"', False),
        ('{"\\n":1,"\\', 'n"', True),
        ('{"\\u0061":1,"', 'a"', True),
        ('{"a\\"":1,"a\\', '"', False),
        ('say "a", {"a":1,"</think>{"', 'a"', False),
    ],
)
def test_which_tokens_would_write_a_key_twice(written: str, token: str, repeats: bool) -> None:
    reader = KeyReader(["</think>"])
    for byte in written.encode():
        reader.feed(bytes([byte]))
    assert (reader.duplicates(QuoteTokens([token.encode()]), [True]) == [0]) == repeats


@pytest.mark.parametrize("schema", [{"type": "object", "additionalProperties": {"enum": [1]}}, {"type": "object"}])
def test_no_key_comes_twice_though_the_model_knows_few_letters(tmp_path: Path, schema: Any) -> None:
    model = moesaic.load(talking_model(tmp_path / "model"), threads=1)
    vocab, fast = model.config.vocab, model.tokenizer.fast
    known = [fast.token_to_id(letter) for letter in '{}":,ab1']
    logits_V = torch.full((vocab,), -100.0)
    chance = torch.Generator().manual_seed(0)
    keys, ended = 0, 0
    for _ in range(30):
        matcher = Grammar.json(schema).matcher(model.tokenizer, vocab, model.tokenizer.stop_tokens)
        tokens: list[int] = []
        while not matcher.finished and len(tokens) < 60:
            logits_V[known] = torch.randn(len(known), generator=chance)
            tokens.append(int(matcher.mask(logits_V).argmax()))
            matcher.accept(tokens[-1])
        if matcher.finished:
            ended += 1

            def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
                nonlocal keys
                assert len({name for name, _ in pairs}) == len(pairs), pairs
                keys = max(keys, len(pairs))
                return dict(pairs)

            json.loads(fast.decode(tokens), object_pairs_hook=unique)
    assert ended > 5 and keys > 2, "objects with several keys of two letters"
