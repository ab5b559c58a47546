"""What a grammar lets a model write as a call, its parser reads as that call; and an answer may be of a form."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from moesaic.methods import Method, build
from moesaic.serve.core.grammar import Grammar
from moesaic.serve.core.grammars.lark import Rules
from moesaic.serve.parsers import Parser

BYTES = LLTokenizer("byte")
STYLES = ["hermes", "glm", "qwen3_coder", "llama3", "mistral", "deepseek_v3", "kimi_k2"]
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "enum": ["Paris", "Rome"]},
                    "note": {"type": "string", "maxLength": 4},
                    "days": {"$ref": "#/$defs/days"},
                    "fine": {"type": "boolean"},
                },
                "required": ["city", "days"],
                "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
            },
        },
    },
    {"type": "function", "function": {"name": "clock"}},
]
NAMES = {"weather", "clock"}
ENDS = (
    b"</arg_value>",
    b"</parameter>",
    b"<|tool_calls_section_end|>",
    b"<|end|>",
)  # that free choice would hardly ever write


def sampled(grammar: Grammar, seed: int, most: int = 600) -> str | None:
    """A text of the grammar, by chance; None if it gets too long. Free text is ended now and then."""
    matcher = LLMatcher(BYTES, grammar.text, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    chance, found = random.Random(seed), bytearray()
    for _ in range(most):
        if matcher.is_stopped() or (matcher.is_accepting() and chance.random() < 0.3):
            return found.decode()
        mask = allocate_token_bitmask(1, BYTES.vocab_size)
        fill_next_token_bitmask(matcher, mask, 0)
        allowed = [byte for byte in range(10, 127) if mask[0][byte // 32] >> (byte % 32) & 1]
        forced = matcher.compute_ff_bytes()
        for end in chance.sample(ENDS, len(ENDS)) if chance.random() < 0.1 else ():
            if not forced and matcher.validate_tokens(list(end)) == len(end):
                forced = end
        more = forced or bytes([chance.choice(allowed)])
        assert matcher.consume_tokens(list(more))
        found += more
    return None


def parser(name: str) -> Parser:
    return build(Method(name), Parser, "test")


@pytest.mark.parametrize("style", STYLES)
def test_calls_of_the_grammar_are_read_as_they_were_meant(style: str) -> None:
    parameters = TOOLS[0]["function"]["parameters"]
    strict = Draft202012Validator({**parameters, "additionalProperties": False})
    seen: set[str] = set()
    for seed in range(60):
        rules = Rules()
        after = parser(style).call_rules(rules, TOOLS)
        assert after
        start = " | ".join(f"{rules.literal(tag)} {rest}" for tag, rest in after.items())
        text = sampled(Grammar.of(rules, start, "tools"), seed)
        if text is None or "�" in text:
            continue
        message = parser(style).parse(text, TOOLS)
        assert message.calls and not message.content, text
        for call in message.calls:
            assert call.name in NAMES, text
            found = json.loads(call.arguments)
            seen.add(call.name)
            if call.name == "clock":
                assert found == {}
            else:
                free = {name: value for name, value in found.items() if name != "note"}
                assert isinstance(found.get("note", ""), str)
                assert not list(strict.iter_errors(free)), text
    assert seen == NAMES


def test_an_answer_of_gpt_oss_is_in_its_channel() -> None:
    prompt, form = "<|start|>assistant", Grammar.json({"enum": [1, 2]})
    thought = False
    for seed in range(20):
        rules = Rules()
        before = parser("gpt_oss").before_answer(rules, prompt)
        assert before is not None
        text = sampled(Grammar.of(rules, before + rules.grammar(form.parts), "tools"), seed)
        if text is not None:
            message = parser("gpt_oss").parse(text, (), prompt)
            assert message.content in ("1", "2"), text
            thought |= bool(message.reasoning)
    assert thought
    assert parser("gpt_oss").before_answer(Rules(), "<|start|>assistant<|channel|>final<|message|>") is None


@pytest.mark.parametrize("style", STYLES)
def test_an_answer_is_a_call_or_of_the_form(style: str) -> None:
    form = Grammar.json({"type": "object", "properties": {"answer": {"enum": [1, 2]}}, "required": ["answer"]})
    kinds = set()
    for seed in range(30):
        rules = Rules()
        after = parser(style).call_rules(rules, TOOLS[1:])
        assert after
        calls = " | ".join(f"{rules.literal(tag)} {rest}" for tag, rest in after.items())
        grammar = Grammar.of(rules, f"{rules.grammar(form.parts)} | {calls}", "tools")
        text = sampled(grammar, seed)
        assert text is not None
        message = parser(style).parse(text, TOOLS[1:])
        if message.calls:
            assert {call.name for call in message.calls} == {"clock"} and not message.content
            kinds.add("call")
        else:
            assert json.loads(message.content) in ({"answer": 1}, {"answer": 2})
            kinds.add("answer")
    assert kinds == {"call", "answer"}
