"""Anthropic's own client."""

from __future__ import annotations

from typing import Any

import anthropic

SYSTEM = "You count."
HELLO: list[Any] = [{"role": "user", "content": "Hello there"}]
GREEDY = {"temperature": 0.0}  # of which the newest client knows nothing
WEATHER: Any = {
    "name": "weather",
    "description": "The weather of a place",
    "input_schema": {
        "type": "object",
        "properties": {"place": {"enum": ["Bonn", "Ulm"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["place", "days"],
    },
}


def client(at: Any) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=at.url, api_key=at.key, max_retries=0)


def check_create(at: Any) -> None:
    message = client(at).messages.create(model=at.model, max_tokens=8, messages=HELLO, system=SYSTEM)
    assert message.role == "assistant" and message.type == "message"
    assert message.stop_reason in ("max_tokens", "end_turn")
    assert message.usage.output_tokens <= 8
    assert all(block.type in ("text", "thinking") for block in message.content)


def check_count_is_what_a_message_uses(at: Any) -> None:
    counted = client(at).messages.count_tokens(model=at.model, messages=HELLO, system=SYSTEM)
    message = client(at).messages.create(model=at.model, max_tokens=1, messages=HELLO, system=SYSTEM)
    usage = message.usage
    read = usage.input_tokens + (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
    assert counted.input_tokens == read > 0


def check_stream_is_the_message(at: Any) -> None:
    asked: Any = {"model": at.model, "max_tokens": 24, "messages": HELLO, "extra_body": GREEDY}
    whole = client(at).messages.create(**asked)
    with client(at).messages.stream(**asked) as stream:
        pieces = list(stream.text_stream)
        final = stream.get_final_message()
    texts = ["".join(block.text for block in found.content if block.type == "text") for found in (whole, final)]
    assert "".join(pieces) == texts[0] == texts[1]
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens


def check_forced_tool(at: Any) -> None:
    asked: Any = {
        "model": at.model, "max_tokens": 200, "messages": HELLO, "tools": [WEATHER],
        "tool_choice": {"type": "tool", "name": "weather"},
    }  # fmt: skip
    message = client(at).messages.create(**asked)
    (call,) = [block for block in message.content if block.type == "tool_use"]
    assert message.stop_reason == "tool_use"
    assert call.name == "weather" and set(call.input) == {"place", "days"} and call.input["place"] in ("Bonn", "Ulm")
    with client(at).messages.stream(**asked) as stream:
        (streamed,) = [block for block in stream.get_final_message().content if block.type == "tool_use"]
    assert set(streamed.input) == {"place", "days"}
    # The answer of the tool goes back, and the model goes on.
    turns: list[Any] = [
        *HELLO,
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "Rain"}]},
    ]
    after = client(at).messages.create(model=at.model, max_tokens=4, messages=turns, tools=[WEATHER])
    assert after.usage.output_tokens >= 1


def check_stop_sequence(at: Any) -> None:
    asked: Any = {"model": at.model, "max_tokens": 24, "messages": HELLO, "extra_body": GREEDY}
    text = client(at).messages.create(**asked).content[0].text
    stop = text[len(text) // 2 :][:2]
    stopped = client(at).messages.create(**asked, stop_sequences=[stop])
    assert stopped.stop_reason == "stop_sequence" and stopped.stop_sequence == stop
    assert "".join(block.text for block in stopped.content) == text[: text.index(stop)]


def check_prefill(at: Any) -> None:
    turns: list[Any] = [*HELLO, {"role": "assistant", "content": "The number"}]
    message = client(at).messages.create(model=at.model, max_tokens=4, messages=turns, extra_body=GREEDY)
    assert message.usage.output_tokens >= 1


def check_errors(at: Any) -> None:
    for asked, kind in (
        ({"model": "nobody", "max_tokens": 4, "messages": HELLO}, anthropic.NotFoundError),
        ({"model": at.model, "max_tokens": 0, "messages": HELLO}, anthropic.BadRequestError),
        (
            {"model": at.model, "max_tokens": 4, "messages": [{"role": "robot", "content": "x"}]},
            anthropic.BadRequestError,
        ),
    ):
        try:
            client(at).messages.create(**asked)
        except kind as error:
            assert error.body["type"] == "error" and error.body["error"]["message"], error.body
        else:
            raise AssertionError(f"{asked} was answered")


def check_models(at: Any) -> None:
    assert at.model in [model.id for model in client(at).models.list()]


async def check_async(at: Any) -> None:
    async with anthropic.AsyncAnthropic(base_url=at.url, api_key=at.key, max_retries=0) as one:
        message = await one.messages.create(model=at.model, max_tokens=4, messages=HELLO)
        async with one.messages.stream(model=at.model, max_tokens=4, messages=HELLO) as stream:
            final = await stream.get_final_message()
    assert message.usage.output_tokens >= 1 and final.usage.output_tokens >= 1


def check_passages_are_read_and_sent_back(at: Any) -> None:
    """A search that the server runs: its blocks are of types that the client knows, or keeps as they are."""
    asked: list[Any] = [{"role": "user", "content": "Where does the Danube end?"}]
    tools: list[Any] = [{"type": "file_search"}]
    message = client(at).messages.create(model=at.model, max_tokens=12, messages=asked, tools=tools)
    kinds = [block.type for block in message.content]
    assert kinds[:2] == ["server_tool_use", "file_search_tool_result"], kinds
    found: Any = message.content[1]
    assert found.content[0]["type"] == "search_result" and "Black Sea" in str(found.content[0])
    again = [*asked, {"role": "assistant", "content": message.model_dump(warnings=False)["content"]}, *HELLO]
    assert client(at).messages.create(model=at.model, max_tokens=4, messages=again).usage.output_tokens <= 4
