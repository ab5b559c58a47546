"""Tool calls and reasoning: every style, however the text is cut, and text that only looks like a call."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
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
PIECES = st.sampled_from([*TAGS.split(" "), *MORE_TAGS.split(" "), *WORDS.split(" "), *CALLS, " "])
TEXTS = st.lists(PIECES, max_size=24).map("".join)


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


def spell(style: str, call: str, arguments: dict[str, Any]) -> str:
    """A call as a model of that style was trained to write it."""
    if style == "hermes":
        content = json.dumps({"name": call, "arguments": arguments}, ensure_ascii=False)
        return f"<tool_call>\n{content}\n</tool_call>"

    def plain(value: Any) -> str:
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

    if style == "glm":
        pairs = [f"<arg_key>{key}</arg_key>\n<arg_value>{plain(v)}</arg_value>\n" for key, v in arguments.items()]
        return f"<tool_call>{call}\n{''.join(pairs)}</tool_call>"
    pairs = [f"<parameter={key}>\n{plain(value)}\n</parameter>\n" for key, value in arguments.items()]
    return f"<tool_call>\n<function={call}>\n{''.join(pairs)}</function>\n</tool_call>"


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
    @given(calls=st.lists(ARGUMENTS, min_size=1, max_size=3), cuts=st.lists(st.integers(0, 400)))
    def test_reads_what_a_model_writes(self, style: str, calls: list[dict[str, Any]], cuts: list[int]) -> None:
        text = "<think>\nShort.\n</think>\n\nLooking it up.\n" + "\n".join(spell(style, "weather", a) for a in calls)
        places = sorted({0, len(text), *(cut % len(text) for cut in cuts)})
        events = read(style, [text[a:b] for a, b in pairwise(places)])
        assert events[:2] == [Reasoning("Short."), Content("Looking it up.")]
        message = collect(events)
        assert message.content == "Looking it up."
        assert [json.loads(call.arguments) for call in message.calls] == calls
        assert {call.name for call in message.calls} == {"weather"}
        assert [event.call for event in events if isinstance(event, CallEnded)] == list(range(len(calls)))

    @given(text=TEXTS, cuts=st.lists(st.integers(0, 400)))
    def test_every_cut_equals_the_whole(self, style: str, text: str, cuts: list[int]) -> None:
        whole = read(style, [text])
        places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
        assert read(style, [text[a:b] for a, b in pairwise(places)]) == whole
        assert read(style, list(text)) == whole

    @given(text=TEXTS)
    def test_nothing_is_lost_where_there_is_no_call(self, style: str, text: str) -> None:
        reader = parser(style, reasoning=False).reader(tools=TOOLS)
        message = collect([*reader.push(text), *reader.finish()])
        if not message.calls:
            assert message.content == text

    @given(text=TEXTS)
    def test_arguments_are_whole_only_when_a_call_ends(self, style: str, text: str) -> None:
        events = read(style, list(text))
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
        assert read(style, [text], tools=None) == [Content(text)]

    def test_a_call_is_reported_before_it_ends(self, style: str) -> None:
        text = spell(style, "weather", {"city": "Bern", "days": 1})
        reader = parser(style).reader(tools=TOOLS)
        events = reader.push(text[: text.index("days")])
        assert CallStarted(0, "weather") in events
        assert '"Bern"' in "".join(event.text for event in events if isinstance(event, CallArguments))

    def test_a_missing_closing_tag_is_forgiven_at_the_end(self, style: str) -> None:
        text = spell(style, "weather", {"city": "Bern", "days": 1}).removesuffix("</tool_call>").rstrip()
        message = parser(style).parse(text, TOOLS)
        if style == "glm":  # where it is the only sign that no argument is missing
            assert message == Message(content=text)
        else:
            assert [call.name for call in message.calls] == ["weather"]

    @pytest.mark.parametrize("keep", [15, 30, 45, 60])
    def test_a_call_cut_short_is_content(self, style: str, keep: int) -> None:
        text = "Well. " + spell(style, "weather", {"city": "Bern, or Thun", "days": 1})[:keep]
        assert parser(style).parse(text, TOOLS) == Message(content=text)


@pytest.mark.parametrize("name", PARSERS)
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
