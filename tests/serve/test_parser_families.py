"""What each family writes beside its usual form: other forms of a call, its own reasoning tags, special tokens. And
that a call comes back from what a template makes of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken
from tokenizers.models import WordLevel

from moesaic.methods import Method, build
from moesaic.model.tokenizer import Tokenizer
from moesaic.serve.core.text import TextStream
from moesaic.serve.parsers import Call, Message, Parser, collect, detect
from moesaic.serve.parsers._signs import SIGNS
from tests.matrix import PARSERS

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "where": {"type": "object"}},
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in ("weather", "now")]
RUNS_CODE = [*TOOLS, {"type": "function", "function": {"name": "python"}}]
NOW = Call("now", "{}")
WEATHER = Call("weather", '{"city": "Bern"}')
OBJECT = '{"name": "now", "parameters": {}}'


def parser(name: str) -> Parser:
    return build(Method(name), Parser, "test")


CASES: list[tuple[str, str, Message]] = [
    ("llama3", f"Well: {OBJECT}", Message("Well:", "", [NOW])),
    ("llama3", f"{OBJECT}; {OBJECT}", Message(calls=[NOW, NOW])),
    ("llama3", '{"type": "function", "name": "now", "parameters": {}}', Message(calls=[NOW])),
    ("llama3", '{"answer": 42}', Message('{"answer": 42}')),
    ("llama3", '{"name": "Ada", "age": 36}', Message('{"name": "Ada", "age": 36}')),
    ("llama3", '<|python_tag|>weather.call(city="Bern")', Message(calls=[WEATHER])),
    ("llama3", '[weather(city="Bern"), now()]', Message(calls=[WEATHER, NOW])),
    ("llama3", "<|python_tag|>import os", Message("<|python_tag|>import os")),
    ("llama4", OBJECT, Message(calls=[NOW])),
    ("llama4", '[weather(city="Bern"), now()]', Message(calls=[WEATHER, NOW])),
    ("llama4", "[1, 2]", Message("[1, 2]")),
    ("llama4", "[other()]", Message("[other()]")),
    ("pythonic", "[weather(city='Bern')]", Message(calls=[WEATHER])),
    ("pythonic", "[weather('Bern')]", Message(calls=[WEATHER])),
    ("pythonic", "[weather(city=Bern)]", Message(calls=[WEATHER])),
    ("pythonic", '[weather(days="3")]', Message(calls=[Call("weather", '{"days": 3}')])),
    ("pythonic", "[weather(city='a', city='b')]", Message("[weather(city='a', city='b')]")),
    ("pythonic", "[weather(days=days)]", Message("[weather(days=days)]")),
    ("pythonic", "[now()] Done.", Message(" Done.", "", [NOW])),
    ("mistral", '[TOOL_CALLS]weather[ARGS]{"city": "Bern"}[TOOL_CALLS]now[ARGS]{}', Message(calls=[WEATHER, NOW])),
    ("mistral", '[TOOL_CALLS]weather{"city": "Bern"}', Message(calls=[WEATHER])),
    ("mistral", '[TOOL_CALLS] [{"name": "now", "arguments": {}, "id": "abcdefghi"}]', Message(calls=[NOW])),
    ("mistral", "[THINK]So.[/THINK]Yes.", Message("Yes.", "So.")),
    ("mistral", "[THINK]So.[TOOL_CALLS]now[ARGS]{}", Message("", "So.", [NOW])),
    (
        "deepseek_v3",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        Message(calls=[NOW]),
    ),
    (
        "deepseek_v32",
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="weather">\n<｜DSML｜parameter name="city" string="true">Bern'
        "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
        Message(calls=[WEATHER]),
    ),
    ("gemma", '```tool_code\nprint(weather(city="Bern"))\n```', Message(calls=[WEATHER])),
    ("gemma", '[weather(city="Bern")]', Message(calls=[WEATHER])),
    ("gemma", f"```json\n{OBJECT}\n```", Message(calls=[NOW])),
    ("gemma", "```json\n[1]\n```", Message("```json\n[1]\n```")),
    (
        "gemma4",
        "<|channel>thought\nSo.<channel|>"
        '<|tool_call>call:weather{city:<|"|>a, }b<|"|>,where:{x:[1,{y:null}]}}<tool_call|>',
        Message("", "So.", [Call("weather", '{"city": "a, }b", "where": {"x": [1, {"y": null}]}}')]),
    ),
    (
        "kimi_k2",
        "<think>So.<|tool_call_section_begin|><|tool_call_begin|>functions.now:3<|tool_call_argument_begin|>{}"
        "<|tool_call_end|><|tool_call_section_end|>",
        Message("", "So.", [NOW]),
    ),
    (
        "gpt_oss",
        "<|channel|>analysis<|message|>So.<|end|><|start|>assistant<|channel|>final<|message|>Yes.",
        Message("Yes.", "So."),
    ),
    ("gpt_oss", "Yes.", Message("Yes.")),
    ("gpt_oss", " to=functions.now<|channel|>commentary json<|message|>{}", Message(calls=[NOW])),
    ("gpt_oss", "<|channel|>commentary to=functions.now<|message|>", Message(calls=[NOW])),
    ("gpt_oss", "<|channel|>commentary to=functions.now<|message|>{1}<|call|>", Message("{1}")),
    ("gpt_oss", "<|channel|>commentary to=user<|message|>{}<|end|>", Message("{}")),
    (
        "minicpm5",
        '<function name="weather"><param name="city"><![CDATA[a</param>b]]></param></function>',
        Message(calls=[Call("weather", '{"city": "a</param>b"}')]),
    ),
    ("minicpm5", '<function name="other"></function>', Message('<function name="other"></function>')),
    ("functionary_v32", ">>>all\nHello>>>now\n{}", Message("Hello", "", [NOW])),
    ("phi4", '<|tool_call|>[{"name": "now", "arguments": {}}]<|/tool_call|>', Message(calls=[NOW])),
    ("granite", "<think>So.</think><response>Yes.</response>", Message("Yes.", "So.")),
    ("apriel", "Here are my reasoning steps:\nSo.\n[BEGIN FINAL RESPONSE]\nYes.", Message("Yes.", "So.")),
    ("cohere", "<|START_THINKING|>So.<|END_THINKING|><|START_RESPONSE|>Yes.<|END_RESPONSE|>", Message("Yes.", "So.")),
    ("xlam", 'Sure.\n```json\n[{"name": "now", "arguments": {}}]\n```', Message("Sure.", "", [NOW])),
    ("xlam", '{"name": "other", "arguments": {}}', Message('{"name": "other", "arguments": {}}')),
    (
        "tool_calls",
        '<tool_calls>\n{"name": "now", "arguments": {}}\n{"name": "now", "arguments": {}}\n</tool_calls>',
        Message(calls=[NOW, NOW]),
    ),
    ("tool_calls", "<tool_calls>[]</tool_calls>", Message("<tool_calls>[]</tool_calls>")),
]


@pytest.mark.parametrize(("style", "text", "message"), CASES)
def test_a_form_is_read(style: str, text: str, message: Message) -> None:
    assert parser(style).parse(text, TOOLS) == message
    reader = parser(style).reader(TOOLS)
    piecewise = [event for letter in text for event in reader.push(letter)] + reader.finish()
    assert collect(piecewise) == message


def test_a_program_for_a_tool_that_runs_it() -> None:
    text = '<|python_tag|>print("é")\n'
    (call,) = parser("llama3").parse(text, RUNS_CODE).calls
    assert (call.name, json.loads(call.arguments)) == ("python", {"code": 'print("é")\n'})


def test_every_parser_but_plain_has_a_sign() -> None:
    assert {name for name, _ in SIGNS} == set(PARSERS) - {"plain"}


@pytest.mark.parametrize(("name", "words"), SIGNS)
def test_a_sign_names_its_parser(name: str, words: tuple[str, ...]) -> None:
    """Unless a more particular one stands above it."""
    found = type(detect(" ".join(words)))
    above = [other for other, its in SIGNS[: SIGNS.index((name, words))] if all(w in " ".join(words) for w in its)]
    assert found is type(parser(above[0] if above else name))


# Its tag is put together when it is rendered, so no word of the template shows it.
HIDDEN = (
    "{{ '<tool' + '_call>' }}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "{{ '</tool' + '_call>' }}"
)


@pytest.mark.parametrize(
    ("form", "name"),
    [
        ('{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}', "llama3"),
        ("[{{ c.function.name }}(key='{{ c.function.arguments.key }}')]", "plain"),  # such a call stands alone
        (HIDDEN, "hermes"),
        ("call {{ c.function.name }} with {{ c.function.arguments }}", "plain"),
        ("{{ raise_exception('no calls') }}", "plain"),
    ],
)
def test_a_template_without_known_words_is_known_by_what_it_makes_of_a_call(form: str, name: str) -> None:
    turn = "{% for m in messages %}{{ m.role }}:{{ m.content }}" + CALLS.replace("BODY", form) + ".{% endfor %}"
    assert type(detect(turn)) is type(parser(name))


def special_tokenizer(*special: str) -> Tokenizer:
    words = {word: number for number, word in enumerate(("yes", "now", "{}"))}
    fast = tokenizers.Tokenizer(WordLevel(words, unk_token="yes"))
    fast.add_special_tokens([AddedToken(token, special=True) for token in special])
    return Tokenizer(fast, {"tokenizer.json": b""}, Path("model"))


def test_special_tokens_that_calls_need_are_kept() -> None:
    tokenizer = special_tokenizer("[TOOL_CALLS]", "[ARGS]", "[INST]")
    mistral = parser("mistral")
    assert mistral.markers(tokenizer, calls=True) == ("[TOOL_CALLS]", "[ARGS]")
    assert mistral.markers(tokenizer, calls=False) == ()
    tokens = [tokenizer.fast.token_to_id(token) for token in ("[INST]", "[TOOL_CALLS]", "now", "[ARGS]", "{}")]
    stream = TextStream(tokenizer, markers=mistral.markers(tokenizer, calls=True))
    text = "".join(stream.push(token) for token in tokens)
    assert text.replace(" ", "") == "[TOOL_CALLS]now[ARGS]{}"
    assert mistral.parse(text, TOOLS).calls == [NOW]


def test_a_token_that_is_part_of_a_tag_is_kept() -> None:
    tokenizer = special_tokenizer("<|channel>", "<channel|>", "<|image|>")
    assert parser("gemma4").markers(tokenizer, calls=False) == ("<|channel>", "<channel|>")


class TestPrefill:
    def read(self, text: str, prefill: str, prompt: str = "") -> Message:
        reader = parser("hermes").reader(TOOLS, prompt + prefill, prefill)
        return collect([*reader.push(text), *reader.finish()])

    def test_content_goes_on(self) -> None:
        assert self.read(" and more", "Well") == Message(" and more")

    def test_reasoning_goes_on(self) -> None:
        assert self.read(" and</think>more", "<think>Well") == Message("more", " and")
        assert self.read(" and</think>more", "Well", prompt="<think>\n") == Message("more", " and")

    def test_reasoning_that_ended(self) -> None:
        assert self.read(" more", "<think>a</think>Well") == Message(" more")


# Templates written for this test, each as small as a call's form allows.
CALLS = "{% for c in m.tool_calls or [] %}BODY{% endfor %}"
FORMS: dict[str, str] = {
    "hermes": '<tool_call>{"name": "{{ c.function.name }}", '
    '"arguments": {{ c.function.arguments | tojson }}}</tool_call>',
    "mistral": "[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>"
    "{{ c.function.arguments | tojson }}<|tool_call_end|><|tool_calls_section_end|>",
    "functionary_v31": "<function={{ c.function.name }}>{{ c.function.arguments | tojson }}</function>",
    "minimax_m2": '<minimax:tool_call><invoke name="{{ c.function.name }}">'
    '{% for k, v in c.function.arguments.items() %}<parameter name="{{ k }}">'
    "{{ v if v is string else v | tojson }}</parameter>{% endfor %}</invoke></minimax:tool_call>",
    "apertus": '<|tools_prefix|>[{"{{ c.function.name }}": {{ c.function.arguments | tojson }}}]<|tools_suffix|>',
    "lfm2": "<|tool_call_start|>[{{ c.function.name }}({% for k, v in c.function.arguments.items() %}"
    "{{ k }}={{ v | tojson }}{% if not loop.last %}, {% endif %}{% endfor %})]<|tool_call_end|>",
}


@pytest.mark.parametrize("style", FORMS)
def test_a_call_comes_back_from_what_a_template_makes_of_it(style: str) -> None:
    turn = "{% for m in messages %}{{ m.role }}:{{ m.content }}" + CALLS.replace("BODY", FORMS[style]) + "{% endfor %}"
    template = turn + "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}"
    tokenizer = Tokenizer(
        tokenizers.Tokenizer(WordLevel({}, unk_token="a")), {"chat_template.jinja": template.encode()}, Path("m")
    )
    assert tokenizer.takes_tools
    own = detect(tokenizer.tool_template)
    assert type(own) is type(parser(style))
    given: dict[str, Any] = {"city": 'Bern "am" See,\nand more', "days": 3, "where": {"a": [1, 2.5, None]}}
    call = {"id": "functions.weather:0", "type": "function", "function": {"name": "weather", "arguments": given}}
    before = tokenizer.chat([{"role": "user", "content": "Hi"}])
    after = tokenizer.chat(
        [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    )
    message = own.parse(after.removeprefix(before).removeprefix("assistant:"), TOOLS)
    assert [(one.name, json.loads(one.arguments)) for one in message.calls] == [("weather", given)]
    assert message.content == ""
