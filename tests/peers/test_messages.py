"""Anthropic's Messages API, as llama.cpp's `test_compat_anthropic.py`, vLLM's `tests/entrypoints/anthropic`, SGLang's
`anthropic_messages_kit.py` and the official client use it."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

import moesaic
from moesaic.serve.api.keys import Keys, _hash
from moesaic.serve.api.messages.blocks import BlockBuilder, input_so_far
from moesaic.serve.api.messages.generation import with_pauses
from moesaic.serve.parsers import CallArguments, CallBroken, CallStarted, Content
from tests.serve.api.running import NAME, Running, running

QUESTION: list[Any] = [{"role": "user", "content": "yes or no"}]
CLOCK: dict[str, Any] = {
    "name": "clock",
    "description": "What time it is.",
    "input_schema": {
        "type": "object",
        "properties": {"zone": {"enum": ["UTC", "CET"]}},
        "required": ["zone"],
        "additionalProperties": False,
    },
}
CALL = json.dumps({"name": "clock", "arguments": {"zone": "UTC"}})
CALLED = f"<tool_call> {json.dumps(CALL)} </tool_call>"
THINKS = {"guided_grammar": 'start: <think> "yes" </think> "left"', "max_tokens": 60}
VERSION = {"anthropic-version": "2023-06-01"}


def send(server: Running, path: str = "/v1/messages", **wishes: Any) -> httpx.Response:
    body = {"model": NAME, "messages": QUESTION, "max_tokens": 6, "temperature": 0.0} | wishes
    return server.post(path, {name: value for name, value in body.items() if value is not ...}, headers=VERSION)


def ask(server: Running, **wishes: Any) -> dict[str, Any]:
    answer = send(server, **wishes)
    assert answer.status_code == 200, answer.text
    message = answer.json()
    assert message["id"].startswith("msg_") and message["type"] == "message" and message["role"] == "assistant"
    assert set(message) == {"id", "type", "role", "model", "content", "stop_reason", "stop_sequence", "usage"}
    for block in message["content"]:
        check_block(block)
    check_usage(message["usage"])
    return message


def check_block(block: dict[str, Any]) -> None:
    fields = {
        "text": {"text": str},
        "thinking": {"thinking": str, "signature": str},
        "tool_use": {"id": str, "name": str, "input": dict},
    }[block["type"]]
    assert {name: type(value) for name, value in block.items() if name != "type"} == fields


def check_usage(usage: dict[str, Any]) -> None:
    for name in ("input_tokens", "output_tokens", "cache_read_input_tokens", "cache_creation_input_tokens"):
        assert isinstance(usage[name], int) and usage[name] >= 0


def refused(server: Running, status: int, path: str = "/v1/messages", **wishes: Any) -> dict[str, Any]:
    answer = send(server, path, **wishes)
    assert answer.status_code == status, answer.text
    assert answer.json()["type"] == "error"
    return answer.json()["error"]


def stream(server: Running, **wishes: Any) -> list[dict[str, Any]]:
    """The events, whose order is checked: blocks come one after the other, each from its start to its stop."""
    answer = send(server, stream=True, **wishes)
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = []
    for chunk in answer.text.strip().split("\n\n"):
        name, data = (line.split(": ", 1)[1] for line in chunk.split("\n"))
        events.append(json.loads(data))
        assert events[-1]["type"] == name
    told = [event for event in events if event["type"] != "ping"]
    assert told[0]["type"] == "message_start" and told[0]["message"]["content"] == []
    assert [event["type"] for event in told[-2:]] == ["message_delta", "message_stop"]
    count, inside = 0, False
    for event in told[1:-2]:
        assert event["index"] == (count if event["type"] == "content_block_start" else count - 1)
        assert inside == (event["type"] != "content_block_start")
        inside = event["type"] != "content_block_stop"
        count += event["type"] == "content_block_start"
    assert not inside
    return events


def gathered(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client puts together from events."""
    message: dict[str, Any] = {}
    inputs: dict[int, str] = {}
    for event in copy.deepcopy(events):
        match event["type"]:
            case "message_start":
                message = event["message"]
            case "content_block_start":
                message["content"].append(event["content_block"])
            case "content_block_delta":
                block, delta = message["content"][event["index"]], event["delta"]
                match delta["type"]:
                    case "text_delta":
                        block["text"] += delta["text"]
                    case "thinking_delta":
                        block["thinking"] += delta["thinking"]
                    case "signature_delta":
                        block["signature"] = delta["signature"]
                    case "input_json_delta":
                        inputs[event["index"]] = inputs.get(event["index"], "") + delta["partial_json"]
            case "message_delta":
                message |= event["delta"]
                message["usage"] |= event["usage"]
    for index, text in inputs.items():
        message["content"][index]["input"] = json.loads(text)
    return message


def text_of(message: dict[str, Any]) -> str:
    return "".join(block["text"] for block in message["content"] if block["type"] == "text")


def prompt_tokens(server: Running, messages: list[Any], **more: Any) -> int:
    """Of a chat completion."""
    answer = server.post("/tokenize", {"messages": messages, **more})
    assert answer.status_code == 200, answer.text
    return answer.json()["count"]


def count(server: Running, **wishes: Any) -> int:
    answer = send(server, "/v1/messages/count_tokens", max_tokens=..., temperature=..., **wishes)
    assert answer.status_code == 200, answer.text
    assert set(answer.json()) == {"input_tokens"}
    return answer.json()["input_tokens"]


def total(usage: dict[str, Any]) -> int:
    return usage["input_tokens"] + usage["cache_read_input_tokens"] + usage["cache_creation_input_tokens"]


class TestMessage:
    def test_says_what_a_chat_says(self, server: Running) -> None:
        message = ask(server)
        chat = server.post("/v1/chat/completions", {"messages": QUESTION, "max_tokens": 6, "temperature": 0.0}).json()
        assert text_of(message) == chat["choices"][0]["message"]["content"]
        assert message["stop_reason"] == "max_tokens" and message["model"] == NAME
        assert (total(message["usage"]), message["usage"]["output_tokens"]) == (chat["usage"]["prompt_tokens"], 6)

    def test_ends_its_turn(self, server: Running) -> None:
        message = ask(server, guided_choice=["maybe"], max_tokens=60)
        assert (text_of(message), message["stop_reason"], message["stop_sequence"]) == ("maybe", "end_turn", None)

    def test_blocks_and_text_are_the_same(self, server: Running) -> None:
        blocks = [{"role": "user", "content": [{"type": "text", "text": "yes or no"}]}]
        assert text_of(ask(server, messages=blocks)) == text_of(ask(server))

    @pytest.mark.parametrize("system", ["Count.", [{"type": "text", "text": "Count."}]])
    def test_a_system_prompt(self, server: Running, system: Any) -> None:
        chat = [{"role": "system", "content": "Count."}, *QUESTION]
        assert total(ask(server, system=system)["usage"]) == prompt_tokens(server, chat)

    def test_blocks_of_a_system_prompt_are_paragraphs(self, server: Running) -> None:
        blocks = [{"type": "text", "text": text} for text in ("One.", "Two.")]
        chat = [{"role": "system", "content": "One.\n\nTwo."}, *QUESTION]
        assert count(server, system=blocks) == prompt_tokens(server, chat)

    def test_a_system_message_in_between(self, server: Running) -> None:
        turns = [*QUESTION, {"role": "system", "content": "Count."}, {"role": "user", "content": "more"}]
        assert count(server, messages=turns) == prompt_tokens(server, turns)

    def test_several_turns_and_two_of_one_speaker(self, server: Running) -> None:
        turns = [*QUESTION, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "why"}]
        assert count(server, messages=turns) == prompt_tokens(server, turns)
        twice = [{"role": "user", "content": "one"}, {"role": "user", "content": "two"}]
        assert count(server, messages=twice) == prompt_tokens(server, [{"role": "user", "content": "one\n\ntwo"}])

    def test_stop_sequences(self, server: Running) -> None:
        message = ask(server, guided_choice=["maybe"], stop_sequences=["zz", "yb"], max_tokens=60)
        assert text_of(message) == "ma"
        assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "yb")

    def test_the_end_of_the_context_is_told_apart(self, server: Running) -> None:
        message = ask(server, max_tokens=100_000, ignore_eos=True)
        assert message["stop_reason"] == "model_context_window_exceeded"
        assert total(message["usage"]) + message["usage"]["output_tokens"] == 512

    def test_sampling(self, server: Running) -> None:
        likeliest = text_of(ask(server))
        assert text_of(ask(server, temperature=2.0, top_k=1)) == likeliest
        assert text_of(ask(server, temperature=1.0, top_p=1e-6)) == likeliest
        drawn = [text_of(ask(server, temperature=1.0, seed=seed)) for seed in (1, 1, 2)]
        assert drawn[0] == drawn[1] != drawn[2]

    def test_what_says_nothing_to_a_model_is_taken(self, server: Running) -> None:
        wishes = {
            "metadata": {"user_id": "me"},
            "thinking": {"type": "disabled"},
            "cache_control": {"type": "ephemeral"},
            "tool_choice": {"type": "none"},
            "output_config": {"effort": "low"},
        }
        answer = send(server, "/v1/messages?beta=true", **wishes)
        assert answer.status_code == 200 and "x-moesaic-ignored" not in answer.headers
        answer = send(server, service_tier="auto", context_management={"edits": []})
        assert answer.headers["x-moesaic-ignored"].split(", ") == ["service_tier", "context_management"]
        assert answer.headers["request-id"]

    def test_a_message_of_the_assistant_is_continued(self, server: Running) -> None:
        begun = [*QUESTION, {"role": "assistant", "content": "The number"}]
        message = ask(server, messages=begun, guided_choice=[" 6", " 7"], max_tokens=60)
        assert text_of(message) in (" 6", " 7")
        chat = {"messages": begun, "max_tokens": 6, "temperature": 0.0, "continue_final_message": True}
        chat["add_generation_prompt"] = False
        same = server.post("/v1/chat/completions", chat).json()
        assert text_of(ask(server, messages=begun)) == same["choices"][0]["message"]["content"]
        assert (
            count(server, messages=begun)
            == same["usage"]["prompt_tokens"]
            < count(server, messages=[*begun, *QUESTION])
        )
        assert gathered(stream(server, messages=begun))["content"] == ask(server, messages=begun)["content"]

    def test_documents_and_search_results_are_read(self, server: Running) -> None:
        content = [
            {"type": "document", "title": "T", "source": {"type": "text", "media_type": "text/plain", "data": "D"}},
            {"type": "search_result", "source": "S", "title": "U", "content": [{"type": "text", "text": "V"}]},
            {"type": "text", "text": "yes?"},
        ]
        chat = [{"role": "user", "content": "T\nD\nU\nS\nV\nyes?"}]
        assert count(server, messages=[{"role": "user", "content": content}]) == prompt_tokens(server, chat)

    def test_a_form(self, server: Running) -> None:
        schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
        schema |= {"additionalProperties": False}
        form = {"type": "json_schema", "schema": schema}
        for wishes in ({"output_config": {"format": form}}, {"output_format": form}):
            assert json.loads(text_of(ask(server, max_tokens=60, **wishes)))["n"] in (1, 2)
        error = refused(server, 400, output_config={"format": form | {"schema": {"type": "unheard"}}})
        assert error["message"].startswith("output_config.format")


class TestStream:
    def test_events_make_the_message(self, server: Running) -> None:
        events, message = stream(server), ask(server)
        made = gathered(events)
        assert text_of(made) == text_of(message)
        for name in ("stop_reason", "stop_sequence", "model", "role"):
            assert made[name] == message[name]
        kinds = [event["type"] for event in events]
        assert kinds[1] == "ping" and kinds.count("content_block_delta") > 2

    def test_usage_is_told_first_and_last(self, server: Running) -> None:
        events = stream(server, cache_salt="fresh")
        first = events[0]["message"]["usage"]
        assert first["output_tokens"] == 0 and first["cache_read_input_tokens"] == 0
        last = next(event["usage"] for event in events if event["type"] == "message_delta")
        check_usage(last)
        assert total(first) == total(last) == count(server) and last["output_tokens"] == 6
        again = stream(server, cache_salt="fresh")[0]["message"]["usage"]
        assert again["cache_read_input_tokens"] == total(again) - 1

    def test_a_stop_sequence(self, server: Running) -> None:
        made = gathered(stream(server, guided_choice=["maybe"], stop_sequences=["yb"], max_tokens=60))
        assert (text_of(made), made["stop_reason"], made["stop_sequence"]) == ("ma", "stop_sequence", "yb")

    def test_thoughts_come_first_and_are_signed(self, server: Running) -> None:
        events, message = stream(server, **THINKS), ask(server, **THINKS)
        made = gathered(events)
        assert made["content"] == message["content"]
        thought, text = made["content"]
        assert (thought["type"], thought["thinking"], text["text"]) == ("thinking", "yes", "left")
        assert thought["signature"]
        deltas = [event["delta"]["type"] for event in events if event["type"] == "content_block_delta"]
        assert deltas.index("signature_delta") == deltas.index("text_delta") - 1
        assert message["usage"]["output_tokens_details"]["thinking_tokens"] > 0

    def test_thoughts_may_be_left_out(self, server: Running) -> None:
        wishes = THINKS | {"thinking": {"type": "adaptive", "display": "omitted"}}
        made = gathered(stream(server, **wishes))
        assert made["content"][0]["thinking"] == "" and made["content"][0]["signature"]
        assert ask(server, **wishes)["content"] == made["content"]

    def test_calls_are_streamed(self, server: Running) -> None:
        wishes = {"tools": [CLOCK], "max_tokens": 120, "guided_grammar": f'start: "look " {CALLED} {CALLED}'}
        events, message = stream(server, **wishes), ask(server, **wishes)
        made = gathered(events)
        assert [block["type"] for block in made["content"]] == ["text", "tool_use", "tool_use"]
        assert made["content"][0]["text"] == message["content"][0]["text"] == "look"
        for block in (*made["content"][1:], *message["content"][1:]):
            assert (block["name"], block["input"]) == ("clock", {"zone": "UTC"})
            assert block["id"].startswith("toolu_")
        assert made["stop_reason"] == message["stop_reason"] == "tool_use"
        starts = [event["content_block"] for event in events if event["type"] == "content_block_start"]
        assert [block["input"] for block in starts[1:]] == [{}, {}]

    def test_a_call_that_breaks_is_followed_by_its_text(self) -> None:
        blocks = BlockBuilder()
        events = blocks.push([CallStarted(0, "clock"), CallArguments(0, '{"zone": '), CallBroken(0), Content("{zone")])
        events += blocks.finish()
        assert [event["type"].removeprefix("content_block_") for event in events] == [
            *("start", "delta", "stop", "start", "delta", "stop")
        ]
        assert blocks.blocks == [{"type": "text", "text": "{zone"}]

    def test_an_error_on_the_way_is_the_last_event(
        self, new_engine: Callable[..., moesaic.Engine], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with running(new_engine(), request_seconds=0.2, hold=2) as server:
            answer = send(server, stream=True, max_tokens=400)
            name, data = answer.text.strip().split("\n\n")[-1].split("\n")
            assert name == "event: error"
            assert json.loads(data[6:])["type"] == "error"
            server.hold.release()

    def test_silence_is_broken_by_pings(self) -> None:
        async def listen() -> list[Any]:
            waiting = asyncio.Event()

            async def slow() -> Any:
                await waiting.wait()
                yield ["first"]
                yield ["second"]

            found = []
            async for batch in with_pauses(slow(), 0.001):
                found.append(batch)
                if len(found) == 3:
                    waiting.set()
            return found

        found = asyncio.run(listen())
        assert found[:3] == [None] * 3
        assert [batch for batch in found if batch is not None] == [["first"], ["second"]]


class TestTools:
    @pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "clock"}])
    def test_one_must_be_called(self, server: Running, choice: dict[str, Any]) -> None:
        choice = choice | {"disable_parallel_tool_use": True}
        other = CLOCK | {"name": "other"} if choice["type"] == "tool" else CLOCK
        message = ask(server, tools=[other, CLOCK][-1 if other is CLOCK else 0 :], tool_choice=choice, max_tokens=100)
        (block,) = message["content"]
        assert (block["type"], block["name"]) == ("tool_use", "clock")
        assert block["input"]["zone"] in ("UTC", "CET") and message["stop_reason"] == "tool_use"

    def test_one_after_the_other(self, server: Running) -> None:
        wishes = {"tools": [CLOCK], "max_tokens": 120, "guided_grammar": f"start: {CALLED} {CALLED}"}
        assert len(ask(server, **wishes)["content"]) == 2
        one = ask(server, tool_choice={"type": "auto", "disable_parallel_tool_use": True}, **wishes)
        assert len(one["content"]) == 1

    def test_none_may_be(self, server: Running) -> None:
        wishes = {"tools": [CLOCK], "max_tokens": 60, "guided_grammar": f"start: {CALLED}"}
        message = ask(server, tool_choice={"type": "none"}, **wishes)
        assert [block["type"] for block in message["content"]] == ["text"]

    def test_a_call_that_was_cut_off_has_what_there_is(self, server: Running) -> None:
        choice = {"type": "tool", "name": "clock"}
        whole = ask(server, tools=[CLOCK], tool_choice=choice, max_tokens=60)
        cut = ask(server, tools=[CLOCK], tool_choice=choice, max_tokens=whole["usage"]["output_tokens"] - 3)
        assert cut["stop_reason"] == "max_tokens" and cut["content"][0]["type"] == "tool_use"
        assert input_so_far('{"zone": "U') == {"zone": "U"} and input_so_far("[1") == input_so_far("{nothing") == {}

    @pytest.mark.parametrize(
        ("content", "text"),
        [
            ("noon", "noon"),
            ([{"type": "text", "text": "12"}, {"type": "text", "text": "noon"}], "12\nnoon"),
            (None, ""),
        ],
    )
    def test_results_come_back(self, server: Running, content: Any, text: str) -> None:
        result = {"type": "tool_result", "tool_use_id": "t", "content": content}
        assert count(server, messages=self.turns([result])) == prompt_tokens(server, self.chat(text))

    def test_a_failed_result_says_so(self, server: Running) -> None:
        result = {"type": "tool_result", "tool_use_id": "t", "content": "no clock", "is_error": True}
        assert count(server, messages=self.turns([result])) == prompt_tokens(server, self.chat("Error: no clock"))

    def test_text_beside_a_result_follows_it(self, server: Running) -> None:
        result = {"type": "tool_result", "tool_use_id": "t", "content": "noon"}
        said = {"type": "text", "text": "Thanks."}
        chat = [*self.chat("noon"), {"role": "user", "content": "Thanks."}]
        for content in ([result, said], [said, result]):
            assert count(server, messages=self.turns(content)) == prompt_tokens(server, chat)

    def test_several_calls_and_results_are_one_turn_each(self, server: Running) -> None:
        uses = [{"type": "tool_use", "id": name, "name": "clock", "input": {"zone": "UTC"}} for name in "ab"]
        results = [{"type": "tool_result", "tool_use_id": name, "content": "noon"} for name in "ab"]
        text = {"type": "text", "text": "I look."}
        turns = [*QUESTION, {"role": "assistant", "content": [text, *uses]}, {"role": "user", "content": results}]
        calls = [{"id": name, "function": {"name": "clock", "arguments": {"zone": "UTC"}}} for name in "ab"]
        chat = [*QUESTION, {"role": "assistant", "content": "I look.", "tool_calls": calls}]
        chat += [{"role": "tool", "tool_call_id": name, "content": "noon"} for name in "ab"]
        assert count(server, messages=turns) == prompt_tokens(server, chat)

    def test_thoughts_come_back(self, server: Running) -> None:
        message = ask(server, **THINKS)
        turns = [*QUESTION, {"role": "assistant", "content": message["content"]}, {"role": "user", "content": "more"}]
        assistant = {"role": "assistant", "content": "left", "reasoning_content": "yes"}
        assert count(server, messages=turns) == prompt_tokens(server, [*QUESTION, assistant, turns[-1]])
        turns[1]["content"].insert(0, {"type": "redacted_thinking", "data": "x"})
        assert count(server, messages=turns) == prompt_tokens(server, [*QUESTION, assistant, turns[-1]])

    def test_tools_are_part_of_the_prompt(self, server: Running) -> None:
        function = {"name": "clock", "description": CLOCK["description"], "parameters": CLOCK["input_schema"]}
        chat = prompt_tokens(server, QUESTION, tools=[{"type": "function", "function": function}])
        assert count(server, tools=[CLOCK]) == chat > count(server)

    def turns(self, content: Any) -> list[Any]:
        use = {"type": "tool_use", "id": "t", "name": "clock", "input": {"zone": "UTC"}}
        return [*QUESTION, {"role": "assistant", "content": [use]}, {"role": "user", "content": content}]

    def chat(self, result: str) -> list[Any]:
        call = {"id": "t", "function": {"name": "clock", "arguments": {"zone": "UTC"}}}
        assistant = {"role": "assistant", "content": "", "tool_calls": [call]}
        return [*QUESTION, assistant, {"role": "tool", "tool_call_id": "t", "content": result}]


class TestCounted:
    @pytest.mark.parametrize(
        "wishes",
        [
            {},
            {"system": "Count."},
            {"tools": [CLOCK]},
            {"tools": [CLOCK], "tool_choice": {"type": "any"}},
            {"messages": [*QUESTION, {"role": "assistant", "content": "yes"}, *QUESTION]},
            {"thinking": {"type": "enabled", "budget_tokens": 3}},
            {"output_config": {"format": {"type": "json_schema", "schema": {"enum": [1]}}}},
        ],
    )
    def test_as_many_as_are_used(self, server: Running, wishes: dict[str, Any]) -> None:
        assert count(server, **wishes) == total(ask(server, **wishes)["usage"])

    def test_what_was_marked_for_the_cache_counts_as_written_and_then_as_read(self, server: Running) -> None:
        system = [{"type": "text", "text": "A long prompt. " * 12, "cache_control": {"type": "ephemeral"}}]
        tools = [CLOCK | {"cache_control": {"type": "ephemeral", "ttl": "1h"}}]
        wishes = {"system": system, "tools": tools, "cache_salt": "marked"}
        cold, warm = (ask(server, **wishes)["usage"] for _ in range(2))
        assert cold["cache_creation_input_tokens"] == total(cold) and cold["cache_read_input_tokens"] == 0
        assert warm["cache_read_input_tokens"] > 0.9 * total(cold) and total(warm) == total(cold)
        plain = ask(server, cache_salt="unmarked")["usage"]
        assert plain["cache_creation_input_tokens"] == 0 and plain["input_tokens"] == total(plain)


class TestThreads:
    """The official client's tool runner sends only what is new, and its tools once."""

    def test_only_what_is_new_is_sent(self, server: Running) -> None:
        first = ask(server, system="Count.", tools=[CLOCK], thread={"type": "create"})
        going_on = {"type": "continue", "previous_message_id": first["id"]}
        second = ask(server, messages=[{"role": "user", "content": "more"}], thread=going_on)
        turns = [*QUESTION, {"role": "assistant", "content": first["content"]}, {"role": "user", "content": "more"}]
        whole = ask(server, system="Count.", tools=[CLOCK], messages=turns)
        assert text_of(second) == text_of(whole) and total(second["usage"]) == total(whole["usage"])
        turns += [{"role": "assistant", "content": second["content"]}, *QUESTION]
        third = gathered(stream(server, thread=going_on | {"previous_message_id": second["id"]}))
        assert total(third["usage"]) == count(server, system="Count.", tools=[CLOCK], messages=turns)

    def test_one_that_is_gone_is_sent_anew(self, server: Running) -> None:
        gone = {"type": "continue", "previous_message_id": "msg_nothing"}
        error = refused(server, 404, thread=gone)
        assert (error["type"], error["details"]) == ("not_found_error", {"error_code": "thread_not_found"})
        response = server.post("/v1/responses", {"input": "yes", "max_output_tokens": 2}).json()["id"]
        refused(server, 404, thread=gone | {"previous_message_id": response})
        first = ask(server, thread={"type": "create"})
        with server.http() as client:
            assert client.get(f"/v1/responses/{first['id']}").status_code == 404

    def test_what_it_began_with_stays(self, server: Running) -> None:
        first = ask(server, system="Count.", thread={"type": "create"})
        going_on = {"type": "continue", "previous_message_id": first["id"]}
        assert ask(server, system="Count.", thread=going_on)["content"]
        error = refused(server, 400, system="Do not.", thread=going_on)
        assert error["details"]["error_code"] == "thread_fingerprint_mismatch"

    def test_a_server_that_keeps_nothing_says_so(self, new_engine: Callable[..., moesaic.Engine]) -> None:
        with running(new_engine(), response_bytes=0) as server:
            error = refused(server, 400, thread={"type": "create"})
            assert error["details"]["error_code"] == "thread_unsupported_request"


@pytest.fixture(scope="module")
def guarded(new_engine: Callable[..., moesaic.Engine]) -> Iterator[Running]:
    keys = Keys(frozenset([_hash("mine")]))
    with running(new_engine(), keys=keys, max_body=1 << 16, max_queue=0) as found:
        yield found


class TestErrors:
    @pytest.mark.parametrize(
        ("wishes", "place"),
        [
            ({"max_tokens": ...}, "max_tokens"),
            ({"max_tokens": -1}, "max_tokens"),
            ({"messages": ...}, "messages"),
            ({"messages": []}, "messages"),
            ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role"),
            ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages.0.content.0"),
            ({"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, "messages.0.content.0"),
            ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages.0.content.0.type"),
            ({"tools": [{"name": "clock"}]}, "tools.0.input_schema"),
            ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0"),
            ({"tools": [CLOCK | {"input_schema": {"type": "string"}}]}, "tools.0.input_schema"),
            ({"tool_choice": {"type": "any"}}, "tool_choice"),
            ({"tools": [CLOCK], "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice"),
            ({"stop_sequences": [""]}, "stop_sequences.0"),
            ({"thinking": {"type": "enabled", "budget_tokens": 6}}, "thinking.budget_tokens"),
            ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
            ({"temperature": "hot"}, "temperature"),
        ],
    )
    def test_a_wrong_request_is_told_where(self, server: Running, wishes: dict[str, Any], place: str) -> None:
        error = refused(server, 400, **wishes)
        assert error["type"] == "invalid_request_error"
        assert error["message"].startswith(f"{place}: ")

    def test_images_are_refused_in_words_also_in_results(self, server: Running) -> None:
        image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aaaa"}}
        result = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "x"}, image]}
        error = refused(server, 400, messages=TestTools().turns([result]))
        assert "images are not supported" in error["message"]

    @pytest.mark.parametrize("role", ["user", "assistant"])
    def test_blocks_belong_to_their_speaker(self, server: Running, role: str) -> None:
        use = {"type": "tool_use", "id": "t", "name": "clock", "input": {}}
        result = {"type": "tool_result", "tool_use_id": "t"}
        turn = {"role": role, "content": [use if role == "user" else result]}
        assert "belongs in a message" in refused(server, 400, messages=[*QUESTION, turn, *QUESTION])["message"]

    def test_calls_without_results_cannot_be_last(self, server: Running) -> None:
        turns = TestTools().turns("x")[:2]
        assert "tool_result" in refused(server, 400, messages=turns)["message"]

    def test_too_long(self, server: Running) -> None:
        error = refused(server, 400, messages=[{"role": "user", "content": "number " * 3000}])
        assert error["type"] == "invalid_request_error" and error["message"].startswith("messages: ")

    def test_nobody_knows_the_model(self, server: Running) -> None:
        assert refused(server, 404, model="claude-x")["type"] == "not_found_error"
        assert refused(server, 404, "/v1/messages/count_tokens", model="claude-x")["type"] == "not_found_error"

    def test_a_path_that_is_none(self, server: Running) -> None:
        assert refused(server, 404, "/v1/messages/batches")["type"] == "not_found_error"
        with server.http() as client:
            answer = client.get("/v1/messages")
        assert answer.status_code == 405 and answer.json()["error"]["type"] == "invalid_request_error"

    def test_no_json(self, server: Running) -> None:
        with server.http() as client:
            answer = client.post("/v1/messages", content=b"{", headers={"content-type": "application/json"})
        assert answer.status_code == 400 and answer.json()["error"]["type"] == "invalid_request_error"

    def test_keys_of_both_kinds(self, guarded: Running) -> None:
        body = {"messages": QUESTION, "max_tokens": 2}
        for headers in ({"x-api-key": "mine"}, {"authorization": "Bearer mine"}):
            assert guarded.post("/v1/messages", body, headers=headers).status_code == 200
        for headers in ({}, {"x-api-key": "yours"}):
            answer = guarded.post("/v1/messages", body, headers=headers)
            assert answer.status_code == 401
            assert answer.json()["error"]["type"] == "authentication_error"

    def test_too_large_a_body(self, guarded: Running) -> None:
        answer = guarded.post("/v1/messages", {"messages": "x" * (1 << 17)}, headers={"x-api-key": "mine"})
        assert answer.status_code == 413 and answer.json()["error"]["type"] == "request_too_large"

    def test_a_server_that_is_shutting_down(self, guarded: Running) -> None:
        guarded.service.draining = True
        try:
            answer = guarded.post(
                "/v1/messages", {"messages": QUESTION, "max_tokens": 2}, headers={"x-api-key": "mine"}
            )
        finally:
            guarded.service.draining = False
        assert answer.status_code == 503 and answer.json()["error"]["type"] == "overloaded_error"


def test_models_in_the_form_the_client_reads(server: Running) -> None:
    with server.http(headers=VERSION) as client:
        listed = client.get("/v1/models?limit=10").json()
        (model,) = listed["data"]
        assert client.get(f"/v1/models/{NAME}").json() == model
    assert (listed["has_more"], listed["first_id"], listed["last_id"]) == (False, NAME, NAME)
    assert (model["type"], model["id"], model["display_name"]) == ("model", NAME, NAME)
    assert model["created_at"].endswith("Z") and model["max_input_tokens"] == 512
    with server.http() as client:
        assert client.get("/v1/models").json()["object"] == "list"


def test_a_client_that_leaves_frees_its_request(server: Running) -> None:
    server.hold.until(server.engine.counts.generated_tokens + 2)
    body = {"messages": QUESTION, "max_tokens": 400, "stream": True}
    with server.http() as client, client.stream("POST", "/v1/messages", json=body) as answer:
        assert next(answer.iter_lines()) == "event: message_start"
    server.hold.release()
    server.until(lambda: server.idle)


def test_an_agent_with_a_long_prompt_and_many_tools(server: Running) -> None:
    """As agents of the terminal send it: everything marked for the cache, and fields of betas beside."""
    marked = {"cache_control": {"type": "ephemeral"}}
    tools = [{"name": f"tool{number}", "input_schema": {"type": "object"}} for number in range(2)]
    texts = [{"type": "text", "text": "<reminder>x</reminder>"}, {"type": "text", "text": "go"} | marked]
    body: dict[str, Any] = {
        "system": [{"type": "text", "text": "You are an agent."}, {"type": "text", "text": "Be brief."} | marked],
        "messages": [{"role": "user", "content": texts}],
        "tools": [*tools, CLOCK | marked],
        "metadata": {"user_id": "session"},
        "max_tokens": 120,
        "temperature": 1,
        "thinking": {"type": "enabled", "budget_tokens": 100},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "guided_grammar": f"start: {CALLED}",
    }
    events = stream(server, **body)
    made = gathered(events)
    assert made["stop_reason"] == "tool_use"
    results = [{"type": "tool_result", "tool_use_id": made["content"][0]["id"], "content": "noon"} | marked]
    turns = [*body["messages"], {"role": "assistant", "content": made["content"]}, {"role": "user", "content": results}]
    answer = ask(server, **body | {"messages": turns, "guided_grammar": None, "guided_choice": ["noon"]})
    assert answer["usage"]["cache_read_input_tokens"] >= total(made["usage"]) - 1
    assert answer["stop_reason"] == "end_turn"
