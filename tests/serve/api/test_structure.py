"""Answers of a given form, and tool calls: always valid, even from a model that knows nothing."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any, Literal

import openai
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic import Engine, load
from moesaic.serve.api.forced_calls import CallListReader
from moesaic.serve.core.grammar import llguidance_tokenizer
from moesaic.serve.parsers import collect
from tests.serve.api.running import NAME, running

QUESTION: list[Any] = [{"role": "user", "content": "A number, as you like it"}]


class Cat(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    name: Literal["Ada", "Bo"]
    age: int = pydantic.Field(ge=0, le=99)
    tame: bool


WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", 'Rome {\\"}]']}, "days": {"type": "integer", "maximum": 9}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
CLOCK: Any = {"type": "function", "function": {"name": "clock", "description": "What time it is."}}


def ask(client: openai.OpenAI, **wishes: Any) -> Any:
    usual = {"model": NAME, "messages": QUESTION, "max_tokens": 120}
    return client.chat.completions.create(**usual | wishes)


@pytest.mark.parametrize("seed", range(5))
def test_a_schema_is_kept(client: openai.OpenAI, seed: int) -> None:
    shape = {"type": "json_schema", "json_schema": {"name": "cat", "schema": Cat.model_json_schema(), "strict": True}}
    answer = ask(client, response_format=shape, seed=seed)
    assert answer.choices[0].finish_reason == "stop"
    Cat.model_validate_json(answer.choices[0].message.content)


def test_the_clients_own_parse_works(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(model=NAME, messages=QUESTION, response_format=Cat, max_tokens=120, seed=1)
    assert isinstance(answer.choices[0].message.parsed, Cat)


@pytest.mark.parametrize(
    ("wish", "pattern"),
    [
        ({"guided_regex": "[a-c]{3}-[0-9]{2}"}, "[a-c]{3}-[0-9]{2}"),
        ({"guided_choice": ["día", "no"]}, "día|no"),
        ({"guided_grammar": 'start: "x" "y"~2..4'}, "xy{2,4}"),
        ({"structured_outputs": {"regex": "(ab)+c"}}, "(ab)+c"),
        ({"structured_outputs": {"choice": ["left", "right"]}}, "left|right"),
        ({"guided_json": {"enum": [1, 2]}}, "[12]"),
        ({"guided_json": '{"const": true}'}, "true"),
    ],
)
def test_forms_users_of_vllm_know(client: openai.OpenAI, wish: dict[str, Any], pattern: str) -> None:
    for seed in range(3):
        answer = ask(client, seed=seed, extra_body=wish)
        if answer.choices[0].finish_reason == "stop":
            assert re.fullmatch(pattern, answer.choices[0].message.content)
        else:
            assert "+" in pattern


@pytest.mark.parametrize(
    "wishes",
    [
        {"extra_body": {"guided_regex": "("}},
        {"extra_body": {"guided_grammar": "start: nothing"}},
        {"extra_body": {"guided_choice": []}},
        {"extra_body": {"guided_choice": ["x"] * 1001}},
        {"extra_body": {"guided_regex": "x" * 70_000}},
        {"extra_body": {"guided_regex": "(.{1,1000}){1,1000}"}},
        {"extra_body": {"guided_json": {"enum": ["x" * 70_000]}}},
        {"extra_body": {"guided_json": "[1"}},
        {"extra_body": {"guided_regex": "a", "guided_choice": ["a"]}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "unheard"}}}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        {"response_format": {"type": "xml"}},
        {"tool_choice": "required"},
        {"tools": [CLOCK], "tool_choice": {"type": "function", "function": {"name": "other"}}},
        {"tools": [CLOCK], "tool_choice": "required", "response_format": {"type": "json_schema", "json_schema": {}}},
    ],
)
def test_a_form_nothing_can_have_is_refused(client: openai.OpenAI, wishes: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, **wishes)
    assert refused.value.type == "invalid_request_error"
    assert refused.value.param


def check(calls: list[tuple[str, str]]) -> None:
    for name, arguments in calls:
        found = json.loads(arguments)
        if name == "weather":
            assert set(found) == {"city", "days"}
            assert found["city"] in WEATHER["function"]["parameters"]["properties"]["city"]["enum"]
        else:
            assert name == "clock"
            assert found == {}, "it names no parameters"


@pytest.mark.parametrize("seed", range(4))
def test_a_tool_that_must_be_called_is(client: openai.OpenAI, seed: int) -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    answer = ask(client, tools=[CLOCK, WEATHER], tool_choice=named, seed=seed, temperature=0.5)
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    assert [call.function.name for call in choice.message.tool_calls] == ["weather"]
    check([("weather", choice.message.tool_calls[0].function.arguments)])


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "clock"}}])
def test_arguments_are_an_object_where_a_tool_does_not_say_so(client: openai.OpenAI, choice: Any) -> None:
    parameters = {"properties": {"zone": {"enum": ["UTC"]}}, "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "clock", "parameters": parameters}}
    for seed in range(4):
        answer = ask(client, tools=[tool], tool_choice=choice, seed=seed, parallel_tool_calls=False)
        assert json.loads(answer.choices[0].message.tool_calls[0].function.arguments) in ({}, {"zone": "UTC"})


def test_one_of_the_tools_must_be_called_whole_and_streamed(client: openai.OpenAI) -> None:
    finished = 0
    for seed in range(4):
        wishes = {"tools": [WEATHER, CLOCK], "tool_choice": "required", "seed": seed, "max_tokens": 200}
        wishes["parallel_tool_calls"] = seed % 2 == 0
        whole = ask(client, **wishes).choices[0]
        calls = [(call.function.name, call.function.arguments) for call in whole.message.tool_calls]
        streamed: dict[int, list[str]] = {}
        ids = []
        for chunk in ask(client, stream=True, **wishes):
            assert not chunk.choices[0].delta.content
            for call in chunk.choices[0].delta.tool_calls or ():
                if call.function.name:
                    streamed[call.index] = [call.function.name, ""]
                    ids.append(call.id)
                streamed[call.index][1] += call.function.arguments or ""
        assert [tuple(call) for call in streamed.values()] == calls
        assert len(set(ids)) == len(calls)
        if whole.finish_reason == "tool_calls":
            finished += 1
            check(calls)
            assert wishes["parallel_tool_calls"] or len(calls) == 1
    assert finished


def test_a_tool_the_model_calls_by_itself(client: openai.OpenAI) -> None:
    """The grammar makes it say what a model that knows tools would say."""
    said = 'start: "yes " <tool_call> /\\{"name": "clock", "arguments": \\{"zone": "(UTC|CET)"\\}\\}/ </tool_call>'
    finished = []
    for choice in ("auto", "none"):
        answer = ask(client, tools=[CLOCK], tool_choice=choice, seed=2, extra_body={"guided_grammar": said})
        finished.append(answer.choices[0].finish_reason)
        message = answer.choices[0].message
        if choice == "auto":
            assert message.tool_calls[0].function.name == "clock"
            assert json.loads(message.tool_calls[0].function.arguments)["zone"] in ("UTC", "CET")
            assert message.content == "yes"
        else:
            assert message.tool_calls is None
            assert "<tool_call>" in message.content
    assert finished == ["tool_calls", "stop"]


@pytest.mark.parametrize("parallel", [True, False])
def test_calls_are_made_one_by_one_if_asked(client: openai.OpenAI, parallel: bool) -> None:
    bad, good = '{"name": "clock", "arguments": {} or}', '{"name": "clock", "arguments": {"zone": "UTC"}}'
    calls = " ".join(f"<tool_call> {json.dumps(said)} </tool_call>" for said in (bad, good, good))
    wishes: Any = {"tools": [CLOCK], "parallel_tool_calls": parallel, "max_tokens": 250}
    wishes["extra_body"] = {"guided_grammar": f"start: {calls}"}
    choice = ask(client, **wishes).choices[0]
    assert len(choice.message.tool_calls) == (2 if parallel else 1)
    assert json.loads(choice.message.tool_calls[0].function.arguments) == {"zone": "UTC"}
    assert choice.finish_reason == "tool_calls" and choice.message.content == f"<tool_call>{bad}</tool_call>"
    told = [call for chunk in ask(client, stream=True, **wishes) for call in chunk.choices[0].delta.tool_calls or ()]
    assert len([call for call in told if call.id]) == (3 if parallel else 2), "with the one that broke"


def test_a_call_that_begins_and_breaks_at_once_is_streamed_to_its_end(client: openai.OpenAI) -> None:
    """Only the last token shows that a tool is called, and that the call will not end."""
    said = '{"name": "clock", "arguments": {'
    wishes = {"tools": [CLOCK], "extra_body": {"guided_grammar": f"start: <tool_call> {json.dumps(said)}"}}
    message = ask(client, **wishes).choices[0].message
    assert (message.content, message.tool_calls) == (f"<tool_call>{said}", None)
    chunks = [chunk.choices[0] for chunk in ask(client, stream=True, **wishes)]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == message.content
    assert chunks[-1].finish_reason == "stop"


def test_reasoning_is_kept_apart(client: openai.OpenAI) -> None:
    wish = {"guided_grammar": 'start: <think> ("yes" | "no") </think> "\\n\\n" ("left" | "right")'}
    message = ask(client, extra_body=wish).choices[0].message
    assert message.reasoning_content in ("yes", "no")
    assert message.content in ("left", "right")
    chunks = list(ask(client, extra_body=wish, stream=True, seed=1))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) in ("yes", "no")
    assert "".join(delta.content or "" for delta in deltas) in ("left", "right")


def test_a_form_follows_the_reasoning_that_the_prompt_opens(directory: Path, tmp_path: Path) -> None:
    thinking = shutil.copytree(directory, tmp_path / "thinking")
    with (thinking / "chat_template.jinja").open("a") as template:
        template.write("<think>\n")
    with running(Engine(load(thinking, threads=1), cache_bytes=1 << 20, seed=0)) as server:
        client = server.client()
        shape = {"type": "json_schema", "json_schema": {"name": "cat", "schema": Cat.model_json_schema()}}
        end = server.engine.tokenizer.fast.token_to_id("</think>")
        # Reasoning goes on until the model ends it, and nothing in it has to be of the form.
        message = ask(client, response_format=shape, max_tokens=10, logit_bias={str(end): -100}).choices[0].message
        assert message.reasoning_content and not message.content
        named = {"type": "function", "function": {"name": "weather"}}
        thoughts: list[list[str | None]] = [[], [], []]
        for seed in range(4):
            soon = {"logit_bias": {str(end): 3}, "max_tokens": 400, "seed": seed, "parallel_tool_calls": False}
            message = ask(client, response_format=shape, **soon).choices[0].message
            thoughts[0].append(message.reasoning_content)
            Cat.model_validate_json(message.content)
            choice = ask(client, tools=[WEATHER], tool_choice="required", **soon).choices[0]
            thoughts[1].append(choice.message.reasoning_content)
            assert choice.finish_reason == "tool_calls"
            check([(call.function.name, call.function.arguments) for call in choice.message.tool_calls])
            streamed = list(ask(client, tools=[WEATHER], tool_choice=named, stream=True, **soon))
            deltas = [chunk.choices[0].delta for chunk in streamed]
            thoughts[2].append("".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas))
            check([("weather", "".join(c.function.arguments or "" for d in deltas for c in d.tool_calls or ()))])
        assert all(any(each) for each in thoughts)
        both = {"guided_grammar": 'start: ("yes" | "no") </think> ("left" | "right")'}
        message = ask(client, extra_body=both).choices[0].message
        assert message.reasoning_content in ("yes", "no") and message.content in ("left", "right")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@given(st.lists(st.tuples(st.sampled_from(["a", "b_2"]), JSON), min_size=1, max_size=4), st.randoms())
def test_calls_are_read_however_they_are_cut(calls: list[tuple[str, Any]], random: Any) -> None:
    written = [(name, json.dumps(value, ensure_ascii=random.random() < 0.5)) for name, value in calls]
    text = "[" + ", ".join(f'{{"name": "{name}", "parameters": {value}}}' for name, value in written) + "]"
    cuts = sorted(random.randrange(len(text)) for _ in range(random.randrange(8)))
    reader, events = CallListReader(), []
    for start, end in zip([0, *cuts], [*cuts, len(text)]):
        events += reader.push(text[start:end])
    message = collect([*events, *reader.finish()])
    assert [(call.name, call.arguments) for call in message.calls] == written


def test_the_server_reads_the_vocabulary_before_a_form_is_asked_for(new_engine) -> None:
    llguidance_tokenizer.cache_clear()
    with running(new_engine()) as server:
        server.until(lambda: llguidance_tokenizer.cache_info().currsize == 1)
        misses = llguidance_tokenizer.cache_info().misses
        answer = ask(server.client(), extra_body={"guided_choice": ["yes", "no"]})
        assert answer.choices[0].message.content in ("yes", "no")
        assert llguidance_tokenizer.cache_info().misses == misses
