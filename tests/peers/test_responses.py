"""Responses with state, as vLLM's `tests/entrypoints/openai/responses`, SGLang's and llama.cpp's suites use them. Every
object is checked by the official client's own types."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pydantic
import pytest
from openai.types import responses as types

import moesaic
from moesaic.serve.api.keys import KeyEntry, Keys, _hash
from moesaic.serve.api.rate_limits import KeyLimits
from moesaic.serve.api.responses.store import OVERHEAD, ResponseStore, Stored
from tests.serve.api.running import NAME, Running, running

EVENT: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(types.ResponseStreamEvent)
ITEM: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(types.ResponseItem)
THINKS = {"guided_grammar": 'start: <think> "yes" </think> "left"'}
CLOCK: dict[str, Any] = {
    "type": "function",
    "name": "clock",
    "strict": False,
    "parameters": {"type": "object", "properties": {"zone": {"enum": ["UTC", "CET"]}}, "required": ["zone"]},
}
CALL = json.dumps({"name": "clock", "arguments": {"zone": "UTC"}})
CALLS = {"guided_grammar": f"start: <tool_call> {json.dumps(CALL)} </tool_call>"}


def ask(server: Running, **wishes: Any) -> dict[str, Any]:
    body = {"input": "yes or no", "temperature": 0.0, "max_output_tokens": 6} | wishes
    answer = server.post("/v1/responses", body)
    assert answer.status_code == 200, answer.text
    return checked(answer.json())


def checked(response: dict[str, Any]) -> dict[str, Any]:
    types.Response.model_validate(response)
    return response


def refused(server: Running, status: int, path: str = "/v1/responses", **wishes: Any) -> dict[str, Any]:
    answer = server.post(path, {"input": "yes", "max_output_tokens": 2} | wishes)
    assert answer.status_code == status, answer.text
    return answer.json()["error"]


def streamed(answer: httpx.Response) -> list[dict[str, Any]]:
    """Checked one by one: the name of an event is its type, and its number its place."""
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = []
    for chunk in answer.text.strip().split("\n\n"):
        name, data = (line.split(": ", 1)[1] for line in chunk.split("\n"))
        event = json.loads(data)
        assert event["type"] == name
        EVENT.validate_python(event)
        events.append(event)
    first = events[0]["sequence_number"]
    assert [event["sequence_number"] for event in events] == list(range(first, first + len(events)))
    return events


def stream(server: Running, **wishes: Any) -> list[dict[str, Any]]:
    body = {"input": "yes or no", "temperature": 0.0, "max_output_tokens": 6, "stream": True} | wishes
    return streamed(server.post("/v1/responses", body))


def said(response: dict[str, Any]) -> str:
    return "".join(part["text"] for item in response["output"] if item["type"] == "message" for part in item["content"])


def get(server: Running, path: str, **headers: str) -> httpx.Response:
    with server.http() as client:
        return client.get(path, headers=headers)


@pytest.fixture
def held(server: Running) -> Iterator[Callable[[int], None]]:
    """Holds the engine after so many more tokens."""
    yield lambda tokens: server.hold.until(server.engine.counts.generated_tokens + tokens)
    server.hold.release()


class TestKept:
    def test_a_response_is_stored_unless_the_client_says_no(self, client: openai.OpenAI) -> None:
        answer = client.responses.create(model=NAME, input="yes", max_output_tokens=4)
        again = client.responses.retrieve(answer.id)
        assert again.model_dump() == answer.model_dump()
        other = client.responses.create(model=NAME, input="yes", max_output_tokens=4, store=False)
        with pytest.raises(openai.NotFoundError, match="Response with id .* not found"):
            client.responses.retrieve(other.id)

    def test_a_streamed_one_too(self, server: Running) -> None:
        events = stream(server)
        assert get(server, f"/v1/responses/{events[-1]['response']['id']}").json() == events[-1]["response"]

    def test_it_says_whether_it_is(self, server: Running) -> None:
        assert ask(server)["store"] is True
        assert ask(server, store=False)["store"] is False

    def test_one_that_was_never_there(self, server: Running) -> None:
        answer = get(server, "/v1/responses/resp_nothing")
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "response_not_found"

    def test_deleted_it_is_gone(self, client: openai.OpenAI, server: Running) -> None:
        answer = client.responses.create(model=NAME, input="yes", max_output_tokens=4)
        with server.http() as http:
            told = http.delete(f"/v1/responses/{answer.id}").json()
        assert told == {"id": answer.id, "object": "response", "deleted": True}
        for act in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
            with pytest.raises(openai.NotFoundError):
                act(answer.id)

    def test_its_input_can_be_listed(self, client: openai.OpenAI) -> None:
        items: list[Any] = [
            {"role": "user", "content": "one"},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"role": "assistant", "content": [{"type": "output_text", "text": "two"}]},
            {"type": "function_call", "call_id": "c", "name": "clock", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "noon"},
        ]
        answer = client.responses.create(model=NAME, input=items, max_output_tokens=2)
        listed = client.responses.input_items.list(answer.id, order="asc").data
        for item in listed:
            ITEM.validate_python(item.model_dump(exclude_none=True))
        kinds = ["message", "reasoning", "message", "function_call", "function_call_output"]
        assert [item.type for item in listed] == kinds
        assert listed[0].content[0].text == "one" and listed[0].content[0].type == "input_text"
        assert listed[1].id == "rs_1"
        newest = client.responses.input_items.list(answer.id, limit=2)
        assert [item.type for item in newest.data] == kinds[:2:-1] and newest.has_more
        every = list(client.responses.input_items.list(answer.id, limit=2))  # page by page
        assert [item.id for item in every] == [item.id for item in reversed(listed)]

    def test_a_text_is_listed_as_a_message(self, client: openai.OpenAI) -> None:
        answer = client.responses.create(model=NAME, input="just text", max_output_tokens=2)
        (item,) = client.responses.input_items.list(answer.id).data
        assert (item.type, item.role, item.content[0].text) == ("message", "user", "just text")

    @pytest.mark.parametrize("query", ["limit=0", "limit=101", "order=up", "after=nothing"])
    def test_a_list_that_cannot_be(self, server: Running, query: str) -> None:
        answer = get(server, f"/v1/responses/{ask(server)['id']}/input_items?{query}")
        assert answer.status_code in (400, 404)
        assert answer.json()["error"]["param"]


class TestContinued:
    def test_it_reads_what_was_said_before(self, server: Running) -> None:
        first = ask(server, input="My name is John.")
        second = ask(server, input="What is my name?", previous_response_id=first["id"])
        assert second["previous_response_id"] == first["id"]
        whole = [
            {"role": "user", "content": "My name is John."},
            {"role": "assistant", "content": said(first)},
            {"role": "user", "content": "What is my name?"},
        ]
        same = ask(server, input=whole)
        assert said(same) == said(second)
        assert same["usage"]["input_tokens"] == second["usage"]["input_tokens"]

    def test_two_may_continue_the_same_one_and_one_the_other(self, server: Running) -> None:
        first = ask(server, input="one")
        left = ask(server, input="two", previous_response_id=first["id"])
        right = ask(server, input="two", previous_response_id=first["id"])
        assert said(left) == said(right)
        third = ask(server, input="three", previous_response_id=left["id"])
        turns: list[Any] = [{"role": "user", "content": "one"}, *first["output"], {"role": "user", "content": "two"}]
        turns += [*left["output"], {"role": "user", "content": "three"}]
        assert ask(server, input=turns)["usage"]["input_tokens"] == third["usage"]["input_tokens"]

    def test_instructions_are_not_inherited(self, server: Running) -> None:
        plain = ask(server, input="one")
        told = ask(server, input="one", instructions="Say nothing but numbers, whatever else is asked.")
        after_plain = ask(server, input="two", previous_response_id=plain["id"])
        after_told = ask(server, input="two", previous_response_id=told["id"])
        grown = after_told["usage"]["input_tokens"] - len_of(server, said(told))
        assert grown == after_plain["usage"]["input_tokens"] - len_of(server, said(plain))
        assert after_told["instructions"] is None

    def test_a_call_is_answered_with_its_result_alone(self, server: Running) -> None:
        call = ask(server, tools=[CLOCK], max_output_tokens=60, **CALLS)
        assert [item["type"] for item in call["output"]] == ["function_call"]
        result = {"type": "function_call_output", "call_id": call["output"][0]["call_id"], "output": "noon"}
        answer = ask(server, input=[result], previous_response_id=call["id"], tools=[CLOCK])
        turns = [{"role": "user", "content": "yes or no"}, *call["output"], result]
        assert ask(server, input=turns, tools=[CLOCK])["usage"]["input_tokens"] == answer["usage"]["input_tokens"]

    def test_the_prefix_is_not_computed_again(self, server: Running) -> None:
        first = ask(server, input="a conversation whose beginning is not computed twice", cache_salt="chain")
        second = ask(server, input="more", previous_response_id=first["id"], cache_salt="chain")
        cached = second["usage"]["input_tokens_details"]["cached_tokens"]
        assert cached >= first["usage"]["input_tokens"] - 1

    def test_what_is_not_there_cannot_be_continued(self, server: Running) -> None:
        error = refused(server, 404, previous_response_id="resp_nothing")
        assert (error["param"], error["code"]) == ("previous_response_id", "previous_response_not_found")
        first = ask(server, input="one")
        second = ask(server, input="two", previous_response_id=first["id"])
        with server.http() as client:
            client.delete(f"/v1/responses/{first['id']}")
        assert first["id"] in refused(server, 404, previous_response_id=second["id"])["message"]

    def test_an_item_is_sent_again_by_its_id_alone(self, server: Running) -> None:
        first = ask(server, max_output_tokens=60, **THINKS)
        kept = get(server, f"/v1/responses/{first['id']}/input_items").json()["data"][0]
        asked = {"role": "user", "content": "more"}
        whole = ask(server, input=[kept, *first["output"], asked])
        named = [{"type": "item_reference", "id": item["id"]} for item in (kept, *first["output"])]
        named[0].pop("type")
        answer = ask(server, input=[*named, asked])
        assert answer["usage"]["input_tokens"] == whole["usage"]["input_tokens"] and said(answer) == said(whole)
        background = ask(server, background=True, guided_choice=["maybe"], max_output_tokens=60)
        path = f"/v1/responses/{background['id']}"
        server.until(lambda: get(server, path).json()["status"] == "completed")
        again = {"type": "item_reference", "id": get(server, path).json()["output"][0]["id"]}
        assert ask(server, input=[asked, again, asked])["output"]
        for each in (first["id"], whole["id"], answer["id"]):
            with server.http() as client:
                client.delete(f"/v1/responses/{each}")
        assert refused(server, 404, input=[*named, asked])["code"] == "item_not_found"

    def test_without_new_input(self, server: Running) -> None:
        first = ask(server, input="one")
        answer = server.post("/v1/responses", {"previous_response_id": first["id"], "max_output_tokens": 2})
        assert answer.status_code == 200
        assert server.post("/v1/responses", {"max_output_tokens": 2}).json()["error"]["param"] == "input"

    def test_tokens_are_counted_exactly(self, client: openai.OpenAI, server: Running) -> None:
        first = ask(server, input="one")
        for wishes in (
            {"input": "two"},
            {"input": "two", "instructions": "Count."},
            {"input": "two", "tools": [CLOCK]},
            {"input": "two", "previous_response_id": first["id"]},
            {"input": [{"role": "user", "content": [{"type": "input_text", "text": "two"}]}]},
        ):
            counted = client.responses.input_tokens.count(model=NAME, **wishes)  # type: ignore[arg-type]
            assert counted.object == "response.input_tokens"
            assert counted.input_tokens == ask(server, **wishes)["usage"]["input_tokens"]


def len_of(server: Running, text: str) -> int:
    return server.post("/tokenize", {"prompt": text, "add_special_tokens": False}).json()["count"]


class TestBackground:
    def test_it_is_queued_and_then_there(self, client: openai.OpenAI, server: Running) -> None:
        whole = ask(server, store=False)
        asked = client.responses.create(
            model=NAME, input="yes or no", temperature=0.0, max_output_tokens=6, background=True
        )
        assert (asked.status, asked.background, asked.output, asked.usage) == ("queued", True, [], None)
        server.until(lambda: client.responses.retrieve(asked.id).status == "incomplete")
        done = client.responses.retrieve(asked.id)
        assert done.output_text == said(whole) and done.usage.output_tokens == 6

    def test_it_is_under_way_once_a_token_came(self, server: Running, held: Callable[[int], None]) -> None:
        held(2)
        asked = ask(server, background=True)
        path = f"/v1/responses/{asked['id']}"
        server.until(lambda: get(server, path).json()["status"] == "in_progress")
        server.hold.release()
        server.until(lambda: checked(get(server, path).json())["status"] == "incomplete")

    def test_it_needs_the_store(self, server: Running) -> None:
        error = refused(server, 400, background=True, store=False)
        assert "background can only be used when `store` is true" in error["message"]

    def test_cancelled_it_frees_its_place_and_stays_so(
        self, client: openai.OpenAI, server: Running, held: Callable[[int], None]
    ) -> None:
        held(3)
        asked = client.responses.create(
            model=NAME, input="yes or no", temperature=0.0, max_output_tokens=400, background=True
        )
        server.until(lambda: client.responses.retrieve(asked.id).status == "in_progress")
        cancelled = client.responses.cancel(asked.id)
        assert cancelled.status == "cancelled" and cancelled.error is None
        server.hold.release()
        server.until(lambda: server.idle)
        assert client.responses.retrieve(asked.id).status == "cancelled"
        assert client.responses.cancel(asked.id).status == "cancelled"
        assert {item.status for item in cancelled.output} <= {"incomplete", "completed"}

    def test_one_that_was_waited_for_cannot_be_cancelled(self, client: openai.OpenAI, server: Running) -> None:
        with pytest.raises(openai.BadRequestError, match="Cannot cancel a synchronous response."):
            client.responses.cancel(ask(server)["id"])

    def test_one_that_has_ended_stays_as_it_is(self, client: openai.OpenAI, server: Running) -> None:
        asked = ask(server, background=True)
        server.until(lambda: client.responses.retrieve(asked["id"]).status == "incomplete")
        assert client.responses.cancel(asked["id"]).status == "incomplete"

    def test_deleted_while_it_runs(self, server: Running, held: Callable[[int], None]) -> None:
        held(2)
        asked = ask(server, background=True, max_output_tokens=400)
        with server.http() as client:
            assert client.delete(f"/v1/responses/{asked['id']}").json()["deleted"]
        server.hold.release()
        server.until(lambda: server.idle)
        assert get(server, f"/v1/responses/{asked['id']}").status_code == 404

    def test_its_stream_is_that_of_one_that_was_waited_for(self, server: Running) -> None:
        events = stream(server, background=True)
        usual = stream(server)
        kinds = [event["type"] for event in events]
        assert kinds[:3] == ["response.created", "response.queued", "response.in_progress"]
        assert kinds[3:] == [event["type"] for event in usual[2:]]
        assert [event["response"]["status"] for event in events[:3]] == ["queued", "queued", "in_progress"]

    def test_a_stream_is_resumed_after_any_event(self, client: openai.OpenAI, server: Running) -> None:
        events = stream(server, background=True)
        name = events[0]["response"]["id"]
        for after in (0, 4, len(events) - 2):
            again = streamed(get(server, f"/v1/responses/{name}?stream=true&starting_after={after}"))
            assert again == events[after + 1 :]
        assert streamed(get(server, f"/v1/responses/{name}?stream=true")) == events
        listened = list(client.responses.retrieve(name, stream=True, starting_after=2))
        assert [event.sequence_number for event in listened] == [event["sequence_number"] for event in events[3:]]

    def test_it_goes_on_when_its_listener_leaves(self, server: Running, held: Callable[[int], None]) -> None:
        held(3)
        body = {"input": "yes or no", "temperature": 0.0, "max_output_tokens": 8, "stream": True, "background": True}
        with server.http() as client, client.stream("POST", "/v1/responses", json=body) as answer:
            first = json.loads(next(line for line in answer.iter_lines() if line.startswith("data: "))[6:])
        name = first["response"]["id"]
        server.hold.release()
        server.until(lambda: get(server, f"/v1/responses/{name}").json()["status"] == "incomplete")
        events = streamed(get(server, f"/v1/responses/{name}?stream=true"))
        assert events[-1]["response"]["usage"]["output_tokens"] == 8

    def test_one_listens_to_what_is_still_to_come(self, server: Running, held: Callable[[int], None]) -> None:
        held(3)
        body = {"input": "yes or no", "temperature": 0.0, "max_output_tokens": 8, "stream": True, "background": True}
        with server.http() as client, client.stream("POST", "/v1/responses", json=body) as answer:
            first = json.loads(next(line for line in answer.iter_lines() if line.startswith("data: "))[6:])
            path = f"/v1/responses/{first['response']['id']}?stream=true&starting_after=0"
            with client.stream("GET", path) as again:
                lines = again.iter_lines()
                assert json.loads(next(line for line in lines if line.startswith("data: "))[6:])["sequence_number"] == 1
                server.hold.release()
                last = [line for line in lines if line.startswith("data: ")][-1]
        assert json.loads(last[6:])["type"] == "response.incomplete"

    def test_one_that_was_not_streamed_cannot_be(self, server: Running) -> None:
        for wishes in ({}, {"background": True}):
            answer = get(server, f"/v1/responses/{ask(server, **wishes)['id']}?stream=true")
            assert answer.status_code == 400 and answer.json()["error"]["param"] == "stream"

    def test_what_has_not_ended_cannot_be_continued(self, server: Running, held: Callable[[int], None]) -> None:
        held(2)
        asked = ask(server, background=True)
        error = refused(server, 400, previous_response_id=asked["id"])
        assert error["code"] == "previous_response_not_ended"
        server.hold.release()
        server.until(lambda: get(server, f"/v1/responses/{asked['id']}").json()["status"] == "incomplete")
        assert ask(server, input="more", previous_response_id=asked["id"])["status"] == "incomplete"


class TestBounds:
    def test_another_key_finds_nothing(self, new_engine: Callable[..., moesaic.Engine]) -> None:
        keys = Keys(frozenset(_hash(key) for key in ("mine", "yours")))
        with running(new_engine(), keys=keys) as server:
            mine, yours = server.client("mine"), server.client("yours")
            answer = mine.responses.create(model=NAME, input="yes", max_output_tokens=2)
            assert mine.responses.retrieve(answer.id).id == answer.id
            for act in (yours.responses.retrieve, yours.responses.delete, yours.responses.cancel):
                with pytest.raises(openai.NotFoundError):
                    act(answer.id)
            with pytest.raises(openai.NotFoundError):
                yours.responses.input_items.list(answer.id)
            with pytest.raises(openai.NotFoundError):
                yours.responses.create(model=NAME, input="no", previous_response_id=answer.id)
            assert mine.responses.retrieve(answer.id).id == answer.id

    def test_a_server_without_a_store(self, new_engine: Callable[..., moesaic.Engine]) -> None:
        with running(new_engine(), response_bytes=0) as server:
            answer = ask(server)
            assert answer["store"] is False
            assert get(server, f"/v1/responses/{answer['id']}").status_code == 404
            assert refused(server, 400, background=True)["param"] == "background"

    def test_what_still_runs_ends_with_the_server(self, new_engine: Callable[..., moesaic.Engine]) -> None:
        with running(new_engine(), hold=2) as server:
            asked = ask(server, background=True, max_output_tokens=400)
            stored = server.service.responses.get("", asked["id"])
            server.server.should_exit = True
            server.until(lambda: not server.service.responses.get("", asked["id"]).running)
            assert stored.response()["status"] == "cancelled"

    def test_what_fails_on_the_way_says_so(self, new_engine: Callable[..., moesaic.Engine]) -> None:
        with running(new_engine(), hold=2, request_seconds=0.2) as server:
            events = stream(server, max_output_tokens=400)
            asked = ask(server, background=True, stream=False, max_output_tokens=400)
            path = f"/v1/responses/{asked['id']}"
            server.until(lambda: get(server, path).json()["status"] == "failed")
            for response in (events[-1]["response"], checked(get(server, path).json())):
                assert (response["status"], response["error"]["code"]) == ("failed", "server_error")
                assert response["error"]["message"]
            assert events[-1]["type"] == "response.failed"
            server.hold.release()

    def test_one_in_the_background_is_one_of_its_keys_requests(self, new_engine: Callable[..., moesaic.Engine]) -> None:
        key = _hash("mine")
        keys = Keys(frozenset([key]), {key: KeyEntry("me", KeyLimits(concurrent=1))})
        with running(new_engine(), keys=keys, hold=2) as server:
            client = server.client("mine")
            asked = client.responses.create(model=NAME, input="yes", background=True, max_output_tokens=400)
            with pytest.raises(openai.RateLimitError):
                client.responses.create(model=NAME, input="yes", max_output_tokens=1)
            assert client.responses.cancel(asked.id).status == "cancelled"
            server.hold.release()
            assert client.responses.create(model=NAME, input="yes", max_output_tokens=1).id

    def test_the_oldest_go_by_age(self) -> None:
        now = [0.0]
        store = ResponseStore(1 << 20, 60.0, lambda: now[0])
        store.add(Stored("a", "", None, b""))
        now[0] = 50.0
        store.add(Stored("b", "", None, b""))
        store.get("", "a")  # used again, it stays
        now[0] = 111.0
        with pytest.raises(Exception, match="not found"):
            store.get("", "a")
        assert len(store) == 0 and store.bytes == 0

    def test_who_uses_most_makes_room(self) -> None:
        store = ResponseStore(10 * OVERHEAD, 60.0, lambda: 0.0)
        store.add(Stored("small", "b", None, b""))
        for number in range(30):
            store.add(Stored(f"large{number}", "a", None, b"x" * OVERHEAD))
        assert store.bytes <= 10 * OVERHEAD
        assert store.get("b", "small") and store.get("a", "large29")
        with pytest.raises(Exception, match="not found"):
            store.get("a", "large0")
        for number in range(9):
            store.add(Stored(f"small{number}", "b", None, b""))
        assert store.get("b", "small8") and store.bytes <= 10 * OVERHEAD


class TestForm:
    def test_events_of_a_message(self, server: Running) -> None:
        kinds = [event["type"] for event in stream(server)]
        middle = [kind for kind in kinds[4:-4] if kind != "response.output_text.delta"]
        assert kinds[:4] == [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
        ]
        assert middle == []
        assert kinds[-4:-1] == [
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
        ]

    def test_events_of_reasoning(self, server: Running) -> None:
        events = stream(server, max_output_tokens=60, **THINKS)
        kinds = [event["type"] for event in events if not event["type"].endswith("delta")]
        assert kinds[2:7] == [
            "response.output_item.added",
            "response.content_part.added",
            "response.reasoning_text.done",
            "response.content_part.done",
            "response.output_item.done",
        ]
        assert kinds[-1] == "response.completed"
        thought = "".join(event["delta"] for event in events if event["type"] == "response.reasoning_text.delta")
        assert thought == "yes"

    def test_reasoning_is_an_item_and_counted(self, client: openai.OpenAI, server: Running) -> None:
        answer = ask(server, max_output_tokens=60, **THINKS)
        assert [item["type"] for item in answer["output"]] == ["reasoning", "message"]
        assert answer["output"][0]["content"] == [{"type": "reasoning_text", "text": "yes"}]
        assert answer["output"][0]["summary"] == [] and "encrypted_content" not in answer["output"][0]
        details = answer["usage"]["output_tokens_details"]
        assert 0 < details["reasoning_tokens"] < answer["usage"]["output_tokens"]
        with client.responses.stream(model=NAME, input="yes", max_output_tokens=60, extra_body=THINKS) as stream:
            for _ in stream:
                pass
            final = stream.get_final_response()
        assert [item.type for item in final.output] == ["reasoning", "message"]

    def test_reasoning_comes_back_in_any_of_its_forms(self, server: Running) -> None:
        wishes = {"include": ["reasoning.encrypted_content"], "max_output_tokens": 60, "store": False, **THINKS}
        first = ask(server, **wishes)
        thought, message = first["output"]
        question = {"role": "user", "content": "more"}
        counts = []
        for kept in (("content",), ("encrypted_content",), ("content", "encrypted_content")):
            sent = {name: thought[name] for name in ("type", "id", "summary", *kept)}
            counts.append(ask(server, input=[question, sent, message, question])["usage"]["input_tokens"])
        assert len(set(counts)) == 1
        without = ask(server, input=[question, message, question])["usage"]["input_tokens"]
        assert counts[0] > without
        foreign = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAAA"}
        assert ask(server, input=[question, foreign, message, question])["usage"]["input_tokens"] == without

    @pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "clock"}])
    def test_a_call_that_was_cut_off_is_incomplete(self, server: Running, choice: Any) -> None:
        wishes: dict[str, Any] = {"tools": [CLOCK], "tool_choice": choice}
        whole = ask(server, max_output_tokens=100, parallel_tool_calls=False, **wishes)
        assert (whole["status"], whole["output"][0]["status"]) == ("completed", "completed")
        cut = whole["usage"]["output_tokens"] - 3
        answer = ask(server, max_output_tokens=cut, **wishes)
        assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        assert [(item["type"], item["status"]) for item in answer["output"]] == [("function_call", "incomplete")]
        events = stream(server, max_output_tokens=cut, **wishes)
        assert events[-1]["type"] == "response.incomplete"
        done = [event["item"]["status"] for event in events if event["type"] == "response.output_item.done"]
        assert done == ["incomplete"]

    def test_a_message_that_was_cut_off_is_incomplete(self, server: Running) -> None:
        answer = ask(server)
        assert answer["output"][0]["status"] == "incomplete" and answer["completed_at"] is None
        whole = ask(server, guided_choice=["maybe"], max_output_tokens=60)
        assert whole["output"][0]["status"] == "completed" and whole["completed_at"] >= whole["created_at"]

    def test_calls_are_streamed_as_their_own_items(self, server: Running) -> None:
        twice = CALLS["guided_grammar"] + CALLS["guided_grammar"].removeprefix("start:")
        events = stream(server, tools=[CLOCK], max_output_tokens=120, guided_grammar=twice)
        done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        assert [(item["type"], json.loads(item["arguments"])) for item in done] == [
            ("function_call", {"zone": "UTC"})
        ] * 2
        assert len({item["call_id"] for item in done}) == 2
        indexes = [event["output_index"] for event in events if event["type"] == "response.output_item.added"]
        assert indexes == [0, 1]

    def test_only_some_tools_are_allowed(self, server: Running) -> None:
        other = CLOCK | {"name": "other"}
        allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "other"}]}
        answer = ask(
            server, tools=[CLOCK, other], tool_choice=allowed, max_output_tokens=100, parallel_tool_calls=False
        )
        assert [item["name"] for item in answer["output"]] == ["other"]
        assert answer["tool_choice"] == allowed and len(answer["tools"]) == 2
        assert refused(server, 400, tools=[CLOCK], tool_choice=allowed)["param"] == "tool_choice"

    def test_what_was_wished_is_told(self, server: Running) -> None:
        wishes = {
            "metadata": {"a": "b"},
            "truncation": "auto",
            "max_tool_calls": 3,
            "safety_identifier": "s",
            "prompt_cache_key": "k",
            "reasoning": {"effort": "low", "summary": "auto"},
            "text": {"verbosity": "low"},
            "parallel_tool_calls": False,
            "service_tier": "auto",
        }
        answer = server.post("/v1/responses", {"input": "yes", "max_output_tokens": 2, **wishes})
        assert "x-moesaic-ignored" not in answer.headers
        told = checked(answer.json())
        for name in ("metadata", "truncation", "max_tool_calls", "safety_identifier", "prompt_cache_key", "reasoning"):
            assert told[name] == wishes[name]
        assert told["text"] == {"format": {"type": "text"}, "verbosity": "low"}

    def test_a_form_is_parsed_by_the_client(self, client: openai.OpenAI) -> None:
        class Cat(pydantic.BaseModel):
            model_config = pydantic.ConfigDict(extra="forbid")
            age: int = pydantic.Field(ge=0, le=9)

        answer = client.responses.parse(model=NAME, input="A cat", text_format=Cat, max_output_tokens=60)
        assert isinstance(answer.output_parsed, Cat)
        assert client.responses.retrieve(answer.id).text.format.name == "Cat"  # type: ignore[union-attr]

    def test_beside_tools_it_is_a_call_or_the_form(self, server: Running) -> None:
        form = {"type": "json_schema", "name": "n", "schema": {"enum": [1, 2]}}
        for seed in range(3):
            answer = ask(server, tools=[CLOCK], text={"format": form}, seed=seed, temperature=1.0, max_output_tokens=99)
            if answer["status"] == "completed":
                last = answer["output"][-1]
                assert last["type"] == "function_call" or json.loads(said(answer)) in (1, 2)

    def test_log_probabilities(self, server: Running) -> None:
        answer = ask(server, include=["message.output_text.logprobs"], top_logprobs=5)
        logprobs = answer["output"][0]["content"][0]["logprobs"]
        assert len(logprobs) == 6 and all(len(entry["top_logprobs"]) == 5 for entry in logprobs)

    def test_a_stop_string(self, server: Running) -> None:
        answer = ask(server, guided_choice=["maybe"], stop="yb", max_output_tokens=60)
        assert said(answer) == "ma" and answer["status"] == "completed"

    def test_too_long_a_conversation_loses_its_beginning_if_asked(self, server: Running) -> None:
        turns: list[Any] = []
        for number in range(40):
            turns += [{"role": "user", "content": f"The number {number} is a number, as you like it."}]
            turns += [{"role": "assistant", "content": "yes"}]
        turns.append({"role": "user", "content": "And now?"})
        assert refused(server, 400, input=turns)["code"] == "context_length_exceeded"
        answer = ask(server, input=turns, truncation="auto", instructions="Count.", max_output_tokens=2)
        used = answer["usage"]["input_tokens"]
        assert 300 < used < 512
        turn = (
            ask(server, input=turns[-3:])["usage"]["input_tokens"]
            - ask(server, input=turns[-1:])["usage"]["input_tokens"]
        )
        assert 512 - used <= turn + 8, "no more was left out than had to be"
        huge = [{"role": "user", "content": "number " * 3000}]
        assert refused(server, 400, input=huge, truncation="auto")["code"] == "context_length_exceeded"

    @pytest.mark.parametrize(
        ("wishes", "param"),
        [
            ({"conversation": "conv_1"}, "conversation"),
            ({"prompt": {"id": "pmpt_1"}}, "prompt"),
            ({"include": ["everything"]}, "include.0"),
            ({"truncation": "middle"}, "truncation"),
            ({"tools": [{"type": "web_search"}]}, "tools.0"),
            ({"tools": [{"type": "mcp", "server_label": "x"}]}, "tools.0"),
            ({"tool_choice": "required"}, "tool_choice"),
            ({"input": []}, "input"),
            ({"input": [{"type": "computer_call", "id": "x"}]}, "input.0.type"),
            (
                {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
                "input.0.content.0.type",
            ),
            ({"max_output_tokens": 0}, "max_output_tokens"),
            ({"metadata": {"a": 1}}, "metadata.a"),
            ({"seed": 2**63}, "seed"),
        ],
    )
    def test_what_cannot_be_is_refused_by_name(self, server: Running, wishes: dict[str, Any], param: str) -> None:
        assert refused(server, 400, **wishes)["param"] == param
