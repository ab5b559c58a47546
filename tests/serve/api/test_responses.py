"""Responses and embeddings, by the official client."""

from __future__ import annotations

import ast
import json
import math
from typing import Any

import openai
import pytest
import torch
import torch.nn.functional as F

from moesaic.serve.api.responses.items import ItemBuilder
from moesaic.serve.parsers import CallStarted, Content, Event, Reasoning
from tests.serve.api.running import NAME, Running

CLOCK: Any = {
    "type": "function",
    "name": "clock",
    "parameters": {"type": "object", "properties": {"zone": {"enum": ["UTC", "CET"]}}, "required": ["zone"]},
}


def ask(client: openai.OpenAI, **wishes: Any) -> Any:
    return client.responses.create(**{"model": NAME, "input": "yes or no", "temperature": 0.0} | wishes)


def test_says_what_a_chat_says(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "system", "content": "Count."}, {"role": "user", "content": "yes or no"}]
    chat = client.chat.completions.create(model=NAME, messages=messages, temperature=0.0, max_tokens=9)
    answer = ask(client, instructions="Count.", max_output_tokens=9)
    assert answer.output_text == chat.choices[0].message.content
    assert answer.usage.input_tokens == chat.usage.prompt_tokens
    assert answer.usage.output_tokens == chat.usage.completion_tokens == 9
    assert answer.status == "incomplete"
    assert answer.incomplete_details.reason == "max_output_tokens"
    items = [{"role": "user", "content": [{"type": "input_text", "text": "yes or no"}]}]
    assert ask(client, instructions="Count.", input=items, max_output_tokens=9).output_text == answer.output_text


def test_events_tell_the_whole_story(client: openai.OpenAI) -> None:
    whole = ask(client, max_output_tokens=12, top_logprobs=1)
    events = list(ask(client, max_output_tokens=12, top_logprobs=1, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text == events[-4].text == events[-1].response.output_text
    assert kinds.count("response.output_text.delta") > 3
    assert (events[2].item.content, events[3].part.text, events[3].part.logprobs) == ([], "", [])
    deltas = [event.logprobs for event in events if event.type == "response.output_text.delta"]
    listed = [entry.logprob for entry in whole.output[0].content[0].logprobs]
    assert len(listed) == 12  # also of tokens that made no text by themselves
    told = [entry.logprob for some in deltas for entry in some]
    assert told == listed[: len(told)] and len(told) > 6
    with client.responses.stream(model=NAME, input="yes or no", temperature=0.0, max_output_tokens=12) as stream:
        for _ in stream:
            pass


def told_with(steps: list[tuple[list[Event], list[str | bytes]]]) -> list[str]:
    """The tokens whose log-probabilities are told with an answer, as one text, a bar between two."""
    items = ItemBuilder()
    deltas = []
    for events, tokens in steps:
        raw = [token if isinstance(token, bytes) else token.encode() for token in tokens]
        infos = [{"token": repr(token), "bytes": list(part)} for token, part in zip(tokens, raw, strict=True)]
        deltas += [told for told in items.push(events, infos) if told["type"] == "response.output_text.delta"]
    items.finish(True)
    found = [
        entry["token"] for item in items.items if item["type"] == "message" for entry in item["content"][0]["logprobs"]
    ]
    told = [entry["token"] for delta in deltas for entry in delta["logprobs"]]
    assert told == found[: len(told)]
    return [ast.literal_eval(token) for token in found]


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        # A step of several tokens, as drafters bring them.
        ([([Reasoning("hm"), Content("Hi you")], ["hm", "</think>", "Hi", " you"])], ["Hi", " you"]),
        ([([Reasoning("hm")], ["hm"]), ([], ["</think>"]), ([Content("think")], ["think"])], ["think"]),
        ([([], ["<think>"]), ([Reasoning("a")], ["a"]), ([Content("a")], ["</think>", "a"])], ["a"]),
        # Held back until it is known to be no mark; a token on both sides of the cut is told once.
        ([([Content("one ")], ["one", " <"]), ([Content("< two")], [" two"])], ["one", " <", " two"]),
        ([([Content("one")], ["one"]), ([], ["<tool_call>"]), ([CallStarted(0, "f")], ["{}"])], ["one"]),
        # Characters of several tokens, and halves of them.
        ([([], [b"\xc3"]), ([Content("éa")], [b"\xa9", "a"])], [b"\xc3", b"\xa9", "a"]),
        ([([], [b"\xc3"]), ([Content("\ufffda")], ["a"])], [b"\xc3", "a"]),
        ([([Content("a")], ["a"]), ([], ["<mark>"]), ([Content("b")], ["b", "<end>"])], ["a", "<mark>", "b", "<end>"]),
    ],
)
def test_an_answer_is_told_with_its_own_tokens(
    steps: list[tuple[list[Event], list[str | bytes]]], expected: list[str | bytes]
) -> None:
    assert told_with(steps) == expected


def test_the_form_of_a_response(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["n"]}
    form = {"format": {"type": "json_schema", "name": "n", "schema": {**schema, "additionalProperties": False}}}
    answer = ask(client, text=form, max_output_tokens=60)
    assert answer.status == "completed"
    assert 0 <= json.loads(answer.output_text)["n"] <= 9


def test_fields_beside_those_of_openai(client: openai.OpenAI) -> None:
    for own in ({"guided_choice": ["maybe"]}, {"structured_outputs": {"choice": ["maybe"]}}):
        assert ask(client, extra_body=own).output_text == "maybe"
    likeliest = ask(client, max_output_tokens=9).output_text
    assert ask(client, temperature=2.0, max_output_tokens=9, extra_body={"top_k": 1}).output_text == likeliest
    urgent = {"min_tokens": 9, "ignore_eos": True, "priority": -1, "deadline_ms": 1000.0, "cache_salt": "mine"}
    assert ask(client, max_output_tokens=9, extra_body=urgent).usage.output_tokens == 9
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, extra_body={"prompt_logprobs": 1})
    assert refused.value.param == "prompt_logprobs"


def test_a_tool_is_called_and_its_result_given_back(client: openai.OpenAI) -> None:
    call = ask(client, tools=[CLOCK], tool_choice={"type": "function", "name": "clock"}, max_output_tokens=60)
    assert call.output[0].type == "function_call"
    assert json.loads(call.output[0].arguments)["zone"] in ("UTC", "CET")
    events = list(
        ask(client, tools=[CLOCK], tool_choice="required", max_output_tokens=60, stream=True, parallel_tool_calls=False)
    )
    done = [event for event in events if event.type == "response.function_call_arguments.done"]
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == done[0].arguments
    back: list[Any] = [
        {"role": "user", "content": "What time is it?"},
        {
            "type": "function_call",
            "call_id": call.output[0].call_id,
            "name": "clock",
            "arguments": call.output[0].arguments,
        },
        {"type": "function_call_output", "call_id": call.output[0].call_id, "output": "noon"},
    ]
    answer = ask(client, input=back, tools=[CLOCK], max_output_tokens=4)
    assert answer.usage.input_tokens > call.usage.input_tokens
    back[-1]["output"] = [{"type": "input_text", "text": "no"}, {"type": "input_text", "text": "on"}]
    parts = ask(client, input=back, tools=[CLOCK], max_output_tokens=4)
    back[-1]["output"] = "no\non"
    answer = ask(client, input=back, tools=[CLOCK], max_output_tokens=4)
    assert parts.usage.input_tokens == answer.usage.input_tokens


def test_what_was_said_and_called_in_one_turn_is_one_message(server: Running) -> None:
    def call(number: str) -> dict[str, str]:
        return {"type": "function_call", "call_id": number, "name": "clock", "arguments": '{"zone": "UTC"}'}

    def result(number: str) -> dict[str, str]:
        return {"type": "function_call_output", "call_id": number, "output": "noon"}

    asked, said = {"role": "user", "content": "What time is it?"}, {"role": "assistant", "content": "I look twice."}
    items = [asked, said, call("1"), call("2"), result("1"), result("2"), call("3"), result("3")]
    calls = [{"id": number, "function": {"name": "clock", "arguments": '{"zone": "UTC"}'}} for number in "123"]
    results = [{"role": "tool", "tool_call_id": number, "content": "noon"} for number in "123"]
    chat = [asked, said | {"tool_calls": calls[:2]}, *results[:2], {"role": "assistant", "tool_calls": calls[2:]}]
    tokens = server.post("/tokenize", {"messages": [*chat, results[2]]}).json()["tokens"]
    server.post("/v1/responses", {"input": items, "max_output_tokens": 1, "cache_salt": "turns"})
    again = {"messages": [*chat, results[2]], "max_tokens": 1, "cache_salt": "turns"}
    used = server.post("/v1/chat/completions", again).json()["usage"]
    assert used["prompt_tokens_details"]["cached_tokens"] == used["prompt_tokens"] - 1 == len(tokens) - 1


def test_a_call_that_breaks_while_it_is_streamed_is_followed_by_its_text(client: openai.OpenAI) -> None:
    said = '{"name": "clock", "arguments": {"zone": 1} and so on'
    wish = {"guided_grammar": f"start: <tool_call> {json.dumps(said)}"}
    asked: Any = {"model": NAME, "input": "yes", "tools": [CLOCK | {"strict": False}], "extra_body": wish}
    with client.responses.stream(**asked) as stream:
        added = [event.item.type for event in stream if event.type == "response.output_item.added"]
        answer = stream.get_final_response()
    assert added == ["function_call", "message"]
    assert [item.type for item in answer.output] == ["message"] and answer.output_text == f"<tool_call>{said}"


def test_what_was_wished_is_told(client: openai.OpenAI) -> None:
    wishes = {"reasoning": {"effort": "low"}, "user": "me", "top_logprobs": 2, "text": {"verbosity": "low"}}
    answer = ask(client, max_output_tokens=2, **wishes)
    assert (answer.reasoning.effort, answer.user, answer.top_logprobs) == ("low", "me", 2)
    assert answer.text.format.type == "text"
    assert answer.id.startswith("resp_") and answer.output[0].id.startswith("msg_")


def test_log_probabilities_may_be_included(client: openai.OpenAI) -> None:
    said = ask(client, max_output_tokens=6, include=["message.output_text.logprobs"]).output[0].content[0]
    assert len(said.logprobs) == 6 and said.logprobs[0].top_logprobs == []
    assert ask(client, max_output_tokens=6).output[0].content[0].logprobs == []


class TestEmbeddings:
    def test_are_the_mean_hidden_state_of_length_one(self, server: Running, client: openai.OpenAI) -> None:
        texts = ["yes or no", "The number 7 is a number"]
        answer = client.embeddings.create(model=NAME, input=texts)
        tokenizer, model = server.engine.tokenizer, server.engine.model
        assert tokenizer is not None
        for text, entry in zip(texts, answer.data, strict=True):
            tokens = tokenizer.encode(text)
            with torch.inference_mode():
                hidden_TD, _ = model._run([tokens])
            expected = F.normalize(hidden_TD.mean(0), dim=0).tolist()
            assert entry.embedding == pytest.approx(expected, abs=1e-4)
            assert math.isclose(sum(x * x for x in entry.embedding), 1.0, rel_tol=1e-4)
        assert answer.usage.prompt_tokens == sum(len(tokenizer.encode(text)) for text in texts)

    def test_more_texts_than_the_engine_takes_at_once(self, server: Running, client: openai.OpenAI) -> None:
        answer = client.embeddings.create(model=NAME, input=["yes", "no"] * 200)
        assert [entry.index for entry in answer.data] == list(range(400))
        assert answer.data[398].embedding == pytest.approx(answer.data[0].embedding, abs=1e-5)
        assert answer.data[1].embedding != pytest.approx(answer.data[0].embedding, abs=1e-2)

    def test_as_numbers_and_as_bytes_are_the_same(self, server: Running, client: openai.OpenAI) -> None:
        plain = server.post("/v1/embeddings", {"input": "yes"}).json()["data"][0]["embedding"]
        packed = client.embeddings.create(model=NAME, input="yes").data[0].embedding  # the client asks for base64
        tokens = server.post("/tokenize", {"prompt": "yes"}).json()["tokens"]
        by_tokens = client.embeddings.create(model=NAME, input=tokens).data[0].embedding
        assert packed == pytest.approx(plain)
        assert by_tokens == pytest.approx(plain)
        assert len(plain) == 48

    @pytest.mark.parametrize("wishes", [{"input": ""}, {"input": []}, {"input": "x", "dimensions": 7000}])
    def test_what_cannot_be_is_refused(self, client: openai.OpenAI, wishes: dict[str, Any]) -> None:
        with pytest.raises(openai.BadRequestError):
            client.embeddings.create(model=NAME, **wishes)
