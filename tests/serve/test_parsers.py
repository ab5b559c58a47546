"""Tool calls and reasoning: every style, however the text is cut, and text that only looks like a call."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from moesaic.errors import UserError
from moesaic.methods import Method, build
from moesaic.serve.parsers import (
    Call,
    CallArguments,
    CallBroken,
    CallEnded,
    CallStarted,
    Content,
    Event,
    Message,
    Parser,
    Reasoning,
    collect,
    detect,
)
from tests.matrix import PARSERS
from tests.serve.parser_styles import ALONE, FRAMED, PLAIN_KEYS, SPELLINGS, completion, spell

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "units": {"type": ["string", "null"]},
                    "where": {"type": "object"},
                },
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
STYLES = [name for name in PARSERS if name != "plain"]

# Pieces of which tests put texts together: every tag of every style whole and cut, JSON, and plain text.
TAGS = (
    "<think> </think> <tool_call> </tool_call> <function=weather> <function= </function> <parameter=city> </parameter>"
)
MORE_TAGS = "<parameter= <arg_key> </arg_key> <arg_value> </arg_value> <tool_ call> </thi < > \n \t \x01"
WORDS = r'{ } [ ] " \ : , "name" "arguments" "weather" weather city days 3 null é 世'
CALLS = [
    '{"name":"now","arguments":{}}',
    '{"name": "weather", "arguments": {',
    '{"name": "weather", "arguments": {"city": "a}\\"<"',
    "<tool_call>now</tool_call>",
]
PIECES = [*TAGS.split(" "), *MORE_TAGS.split(" "), *WORDS.split(" "), *CALLS, " "]


def texts(style: str) -> st.SearchStrategy[str]:
    """Pieces, the style's own tags among them, and a true call whole and cut in two."""
    tags = parser(style).tags(calls=True)
    call = spell(style, "weather", {"city": "Bern", "days": 1}) if style in SPELLINGS else ""
    cut = [call[: len(call) // 2], call[len(call) // 2 :], call[: len(call) // 3], call[-len(call) // 3 :]]
    own = [*tags, *(tag[: len(tag) // 2] for tag in tags), call, *cut, *cut]
    return st.lists(st.sampled_from(PIECES) | st.sampled_from(own), max_size=16).map("".join)


def parser(name: str, **options: Any) -> Parser:
    return build(Method(name, options), Parser, "test")


def joined(events: list[Event]) -> list[Event]:
    """Neighbours of one kind as one, which is all that how the text was cut may change."""
    result: list[Event] = []
    for event in events:
        last = result[-1] if result else None
        if isinstance(event, Content | Reasoning) and type(event) is type(last):
            result[-1] = type(event)(last.text + event.text)  # type: ignore[union-attr]
        elif isinstance(event, CallArguments) and isinstance(last, CallArguments) and event.call == last.call:
            result[-1] = CallArguments(event.call, last.text + event.text)
        else:
            result.append(event)
    return result


def read(name: str, pieces: list[str], **about: Any) -> list[Event]:
    reader = parser(name).reader(**{"tools": TOOLS, **about})
    return joined([event for piece in pieces for event in reader.push(piece)] + reader.finish())


ARGUMENTS = st.fixed_dictionaries(
    {"city": st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="<")), "days": st.integers()},
    optional={
        "where": st.dictionaries(
            st.text(st.characters(exclude_categories=["Cs"])), st.floats(allow_nan=False, allow_infinity=False)
        ),
        "units": st.none(),
    },
)


@pytest.mark.parametrize("style", STYLES)
class TestEveryStyle:
    @settings(max_examples=8)
    @given(given_calls=st.lists(ARGUMENTS, min_size=1, max_size=3), cuts=st.lists(st.integers(0, 400)))
    def test_reads_what_a_model_writes(self, style: str, given_calls: list[dict[str, Any]], cuts: list[int]) -> None:
        calls = [with_plain_keys(one) for one in given_calls] if style in PLAIN_KEYS else given_calls
        text = completion(style, "Short.", "Looking it up.", [("weather", one) for one in calls])
        places = sorted({0, len(text), *(cut % len(text) for cut in cuts)})
        events = read(style, [text[a:b] for a, b in pairwise(places)])
        said = [Reasoning("Short.")] if style in ALONE else [Reasoning("Short."), Content("Looking it up.")]
        assert events[: len(said)] == said
        message = collect(events)
        assert message.content == ("" if style in ALONE else "Looking it up.")
        assert [json.loads(call.arguments) for call in message.calls] == calls
        assert {call.name for call in message.calls} == {"weather"}
        assert [event.call for event in events if isinstance(event, CallEnded)] == list(range(len(calls)))

    @settings(max_examples=8)
    @given(data=st.data(), cuts=st.lists(st.integers(0, 400)))
    def test_every_cut_equals_the_whole(self, style: str, data: st.DataObject, cuts: list[int]) -> None:
        text = data.draw(texts(style))
        whole = read(style, [text])
        places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
        assert read(style, [text[a:b] for a, b in pairwise(places)]) == whole
        assert read(style, list(text)) == whole

    @settings(max_examples=8)
    @given(data=st.data())
    def test_nothing_is_lost_where_there_is_no_call(self, style: str, data: st.DataObject) -> None:
        text = data.draw(texts(style))
        assume(not any(tag in text for tag in dropped(style)))
        reader = parser(style, reasoning=False).reader(tools=TOOLS)
        message = collect([*reader.push(text), *reader.finish()])
        if not message.calls:
            assert message.content == text

    @settings(max_examples=8)
    @given(data=st.data())
    def test_arguments_are_whole_only_when_a_call_ends(self, style: str, data: st.DataObject) -> None:
        events = read(style, list(data.draw(texts(style))))
        ended = {event.call for event in events if isinstance(event, CallEnded)}
        broken = {event.call for event in events if isinstance(event, CallBroken)}
        arguments = {event.call: event.text for event in events if isinstance(event, CallArguments)}
        assert {event.call for event in events if isinstance(event, CallStarted)} == ended | broken
        assert not ended & broken
        for call in ended:
            assert isinstance(json.loads(arguments[call]), dict)
        for call in broken & set(arguments):
            with pytest.raises(ValueError):
                json.loads(arguments[call])

    def test_no_tools_no_calls(self, style: str) -> None:
        text = spell(style, "weather", {"city": "Bern", "days": 1})
        events = read(style, [text], tools=None)
        assert {type(event) for event in events} == {Content}
        if not any(tag in text for tag in dropped(style)):
            assert events == [Content(text)]

    def test_a_call_is_reported_before_it_ends(self, style: str) -> None:
        text = spell(style, "weather", {"city": "Bern", "days": 1})
        reader = parser(style).reader(tools=TOOLS)
        events = reader.push(text[: text.index("days")])
        assert [event.name for event in events if isinstance(event, CallStarted)] == ["weather"]
        assert '"Bern"' in "".join(event.text for event in events if isinstance(event, CallArguments))

    @pytest.mark.parametrize("keep", [15, 30, 45, 60])
    def test_a_call_cut_short_is_content(self, style: str, keep: int) -> None:
        text = "Well. " + spell(style, "weather", {"city": "Bern, or the town of Thun on its lake", "days": 1})[:keep]
        message = parser(style).parse(text, TOOLS)
        assert not message.calls
        assert message.content.startswith("Well.")
        if not any(tag in text for tag in dropped(style)):
            assert message == Message(content=text)


@pytest.mark.parametrize(
    ("style", "ending"),
    [
        ("hermes", "\n</tool_call>"),
        ("qwen3_coder", "\n</tool_call>"),
        ("tool_calls", "]</tool_calls>"),
        ("deepseek_v3", "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"),
        ("kimi_k2", "<|tool_calls_section_end|>"),
        ("mistral", "]"),
        ("gpt_oss", "<|call|>"),
        ("gemma4", "<tool_call|>"),
        ("lfm2", "]<|tool_call_end|>"),
    ],
)
def test_a_missing_closing_tag_is_forgiven_at_the_end(style: str, ending: str) -> None:
    text = spell(style, "weather", {"city": "Bern", "days": 1})
    assert text.endswith(ending)
    message = parser(style).parse(text.removesuffix(ending), TOOLS)
    assert message == Message(calls=[Call("weather", '{"city": "Bern", "days": 1}')])


def test_but_not_where_it_is_the_only_sign_that_no_argument_is_missing() -> None:
    text = spell("glm", "weather", {"city": "Bern", "days": 1}).removesuffix("</tool_call>").rstrip()
    assert parser("glm").parse(text, TOOLS) == Message(content=text)


def dropped(style: str) -> tuple[str, ...]:
    """Tags around content that are not part of it."""
    own = parser(style)
    return (*own.silent, *(own.tags(calls=False) if style in FRAMED else ()))


def with_plain_keys(arguments: dict[str, Any]) -> dict[str, Any]:
    where = {f"key{number}": value for number, value in enumerate(arguments.get("where", {}).values())}
    return {key: value for key, value in arguments.items() if key != "where"} | ({"where": where} if where else {})


@pytest.mark.parametrize("name", [name for name in PARSERS if name not in FRAMED])
class TestReasoning:
    def test_is_apart_from_the_answer(self, name: str) -> None:
        assert read(name, list("\n<think>\n a <b> \n</think>\n\nc\n")) == [Reasoning("a <b>"), Content("c\n")]

    def test_may_be_opened_by_the_prompt(self, name: str) -> None:
        assert read(name, ["a</think>b"], prompt="<|assistant|>\n<think>\n") == [Reasoning("a"), Content("b")]
        assert read(name, ["a</think>b"], prompt="<think></think>\n") == [Content("a</think>b")]
        assert read(name, ["a</think>b"], prompt="Say <think> twice.") == [Content("a</think>b")]

    def test_that_never_ends_is_reasoning(self, name: str) -> None:
        assert read(name, list("<think>a</thin")) == [Reasoning("a</thin")]

    def test_later_in_an_answer_is_only_text(self, name: str) -> None:
        assert read(name, list("Use <think>a</think>.")) == [Content("Use <think>a</think>.")]

    def test_can_be_turned_off(self, name: str) -> None:
        assert parser(name, reasoning=False).parse("<think>a</think>") == Message(content="<think>a</think>")

    def test_comes_as_it_is_written(self, name: str) -> None:
        reader = parser(name).reader()
        assert reader.push("<think>One two") == [Reasoning("One two")]
        assert reader.push(" </th") == []
        assert reader.push("ree") == [Reasoning(" </three")]


@pytest.mark.parametrize(
    ("style", "text"),
    [
        ("hermes", "<tool_call>weather</tool_call>"),
        ("hermes", '<tool_call>{"name": 3, "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "weather", "arguments": [1]}</tool_call>'),
        ("hermes", '<tool_call>{"name": "weather", "arguments": {"days": NaN}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": Bern}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "weather", "arguments": {}} and more</tool_call>'),
        ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'),
        ("hermes", "<tool_call>" + '{"a":' * 5000 + "}" * 5000 + "</tool_call>"),
        ("glm", "<tool_call>\n</tool_call>"),
        ("glm", "<tool_call>two words\n</tool_call>"),
        ("glm", "<tool_call>now<arg_key>a</arg_key>b</tool_call>"),
        ("glm", "<tool_call>now<arg_value>a</arg_value></tool_call>"),
        ("glm", "<tool_call>now" + "<arg_key>a</arg_key><arg_value>1</arg_value>" * 2 + "</tool_call>"),
        ("qwen3_coder", "<tool_call>{}</tool_call>"),
        ("qwen3_coder", "<tool_call><function=></function></tool_call>"),
        ("qwen3_coder", "<tool_call><function=now>text</function></tool_call>"),
        ("qwen3_coder", "<tool_call><function=now></function>text</tool_call>"),
    ],
)
def test_what_only_looks_like_a_call_is_content(style: str, text: str) -> None:
    assert parser(style).parse(f"a {text} b", TOOLS) == Message(content=f"a {text} b")


def test_a_true_call_after_a_false_one() -> None:
    false = '<tool_call>{"name": "weather", "arguments": {"city": }}'
    message = parser("hermes").parse(false + spell("hermes", "now", {}), TOOLS)
    assert message == Message(content=false, calls=[Call("now", "{}")])


def test_hermes_takes_keys_in_any_order_and_arguments_as_text() -> None:
    text = '<tool_call>{"arguments": "{\\"days\\": 1}", "name": "weather"}</tool_call>'
    assert parser("hermes").parse(text, TOOLS).calls == [Call("weather", '{"days": 1}')]


def test_hermes_mends_line_breaks_within_strings() -> None:
    text = '<tool_call>{"name": "weather", "arguments": {"city": "a\nb\\\\"}}</tool_call>'
    assert json.loads(parser("hermes").parse(text, TOOLS).calls[0].arguments) == {"city": "a\nb\\"}


def test_closing_tag_within_a_string_closes_nothing() -> None:
    arguments = {"city": 'a </tool_call> "}'}
    assert (
        json.loads(parser("hermes").parse(spell("hermes", "weather", arguments), TOOLS).calls[0].arguments) == arguments
    )


def test_qwen3_coder_without_the_outer_tag() -> None:
    text = "<function=weather><parameter=days>2</parameter></function> Done."
    assert parser("qwen3_coder").parse(text, TOOLS) == Message(" Done.", "", [Call("weather", '{"days": 2}')])


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("city", "12", "12"),
        ("city", "null", "null"),
        ("units", "null", None),
        ("units", "3", "3"),
        ("days", "12", 12),
        ("days", "twelve", "twelve"),
        ("days", "NaN", "NaN"),
        ("where", '{"a": [true]}', {"a": [True]}),
        ("unknown", "False", False),
        ("unknown", '"\\ud800"', "\ud800"),
    ],
)
@pytest.mark.parametrize("style", ["glm", "qwen3_coder"])
def test_arguments_have_the_type_their_schema_says(style: str, key: str, text: str, value: Any) -> None:
    call = parser(style).parse(spell(style, "weather", {key: text}), TOOLS).calls[0]
    assert json.loads(call.arguments) == {key: value}
    call.arguments.encode()


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '<tool_call>' }}{% if enable_thinking %}<think>", "hermes"),
        ("<tool_call>{function-name}\n<arg_key>{k}</arg_key>", "glm"),
        ("<tool_call>\n<function=example>", "qwen3_coder"),
        ("<|im_start|>", "plain"),
        (None, "plain"),
    ],
)
def test_a_model_s_template_says_what_it_writes(template: str | None, name: str) -> None:
    assert detect(template) == parser(name)


def test_an_unknown_style_is_named() -> None:
    with pytest.raises(UserError, match="hermes"):
        parser("hermess")
