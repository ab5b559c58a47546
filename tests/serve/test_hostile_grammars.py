"""Forms made to cost as much as possible: each is refused, or followed at a bounded cost. What they cost is counted in
the library's own steps, not in seconds."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import moesaic
from moesaic.errors import UserError
from moesaic.serve.core.grammar import Grammar
from tests.serve.made import talking_model


@pytest.fixture(scope="module")
def model() -> Any:
    with tempfile.TemporaryDirectory() as path:
        return moesaic.load(talking_model(Path(path) / "model"), threads=1)


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def doubling(levels: int, times: int = 8) -> str:
    rules = [f"r{n} ::= " + " ".join([f"r{n + 1}"] * times) for n in range(levels)]
    return "\n".join(["root ::= r0", *rules, f'r{levels} ::= "a"'])


def fan_of_references(levels: int) -> dict[str, Any]:
    more = {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 4, "properties": {f"p{n}": {}}} for n in range(levels)}
    return {"$ref": "#/$defs/d0", "$defs": {**more, f"d{levels}": {"properties": {"z": {}}}}}


UNIONS = {"allOf": [{"anyOf": [{"properties": {f"{k}{n}": {"const": 1}}} for k in "abc"]} for n in range(12)]}
CYCLE = {
    "$ref": "#/$defs/a",
    "$defs": {"a": {"allOf": [{"$ref": "#/$defs/b"}]}, "b": {"allOf": [{"$ref": "#/$defs/a"}]}},
}

REFUSED: dict[str, Callable[[], Grammar]] = {
    "levels": lambda: Grammar.json(nested(300)),
    "references": lambda: Grammar.json(fan_of_references(12)),
    "unions": lambda: Grammar.json(UNIONS),
    "itself": lambda: Grammar.json({"$ref": "#"}),
    "cycle": lambda: Grammar.json(CYCLE),
    "properties": lambda: Grammar.json({"properties": {f"k{n}": {} for n in range(2000)}}),
    "parentheses": lambda: Grammar.gbnf("root ::= " + "(" * 2000 + '"a"' + ")" * 2000),
    "repetitions": lambda: Grammar.gbnf('root ::= "a"{1,1000000}'),
    "doubling": lambda: Grammar.gbnf(doubling(40)),
    "rules": lambda: Grammar.gbnf("root ::= r0\n" + "\n".join(f'r{n} ::= "a" r{(n + 1) % 4000}?' for n in range(4000))),
    "endless": lambda: Grammar.gbnf('root ::= "a" root'),
}
FOLLOWED: dict[str, Callable[[], Grammar]] = {
    "enum": lambda: Grammar.json({"enum": [f"k{n}" for n in range(5000)]}),
    "many items": lambda: Grammar.json({"type": "array", "items": {"type": "string"}, "minItems": 100_000}),
    "long string": lambda: Grammar.json({"type": "string", "minLength": 100_000}),
    "repetition": lambda: Grammar.regex("[a-z]{1,100000}"),
    "automaton": lambda: Grammar.regex("(a|b)*a(a|b){18}"),
    "stars": lambda: Grammar.regex("((((a*)*)*)*)*b"),
    "ambiguous": lambda: Grammar.gbnf('root ::= x\nx ::= x x | "a" | ""'),
    "more ambiguous": lambda: Grammar.gbnf('root ::= x x x\nx ::= x x x | x x | [a-z]* | "a" x "b"?'),
    "nested repetition": lambda: Grammar.gbnf("root ::= ((([a-z]{1,1000}){1,1000}){1,1000}){1,1000}"),
    "chain": lambda: Grammar.gbnf(
        "\n".join(
            ["root ::= r0", *(f"r{n} ::= r{n + 1} | r{n + 1} r{n + 1}" for n in range(300)), 'r300 ::= root "a" | "b"']
        )
    ),
    "long literal": lambda: Grammar.gbnf('root ::= "' + "ab" * 10_000 + '"'),
}


@pytest.mark.parametrize("name", REFUSED)
def test_forms_that_nobody_can_follow_are_refused(model: Any, name: str) -> None:
    with pytest.raises(UserError):
        REFUSED[name]().matcher(model.tokenizer, model.config.vocab, model.tokenizer.stop_tokens)


@pytest.mark.parametrize("name", FOLLOWED)
def test_forms_that_are_large_are_followed_or_given_up(model: Any, name: str) -> None:
    """As far as the library's own limits allow; where they end it, there is a reason."""
    vocab = model.config.vocab
    try:
        matcher = FOLLOWED[name]().matcher(model.tokenizer, vocab, model.tokenizer.stop_tokens)
    except UserError:
        return
    chance = torch.Generator().manual_seed(0)
    for _ in range(12):
        allowed = torch.isfinite(matcher.mask(torch.zeros(vocab))).nonzero().flatten()
        if matcher.finished:
            problem = matcher.inner.get_error()
            assert not problem or "limit" in problem or "max" in problem
            return
        assert len(allowed)
        matcher.accept(int(allowed[torch.randint(len(allowed), (1,), generator=chance)]))
