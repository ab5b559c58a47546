"""Answers from the server's texts in the forms that OpenAI's Responses and Anthropic's Messages have for them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

import moesaic
from moesaic.serve.api.knowledge import Bases
from tests.peers.scripted import saying
from tests.serve.api.listed_knowledge import TEXTS, ListedKnowledge
from tests.serve.api.running import NAME, Running, running
from tests.serve.made import talking_model

QUESTION = "Where does the Danube end?"
ANSWER = "It ends in the Black Sea [1]. Vienna lies on it [2]."
TOOL: Any = {"type": "file_search", "vector_store_ids": ["travel"], "max_num_results": 2}
QUOTES = ["It ends in the Black Sea.", "Vienna lies on the Danube."]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    model = moesaic.load(talking_model(tmp_path_factory.mktemp("roomy") / "tiny", context=4096), threads=1)
    engine = moesaic.Engine(model, cache_bytes=16 << 20, seed=0)
    with running(engine, knowledge=Bases({"travel": ListedKnowledge()})) as found, saying(found, ANSWER):
        yield found


def test_a_response_has_the_search_as_an_item_and_cites_files(server: Running) -> None:
    client = server.client()
    include: Any = ["file_search_call.results"]
    response = client.responses.create(model=NAME, input=QUESTION, tools=[TOOL], include=include)
    search, message = response.output
    assert search.type == "file_search_call" and search.status == "completed" and search.queries == [QUESTION]
    assert [one.text for one in search.results or ()] == [TEXTS[0][2], TEXTS[1][2]]
    assert response.output_text == ANSWER
    assert message.type == "message" and message.content[0].type == "output_text"
    annotations = message.content[0].annotations
    assert [one.type for one in annotations] == ["file_citation", "file_citation"]
    assert [one.filename for one in annotations] == ["rivers.md", "cities.md"]  # type: ignore[union-attr]
    assert ANSWER[: annotations[0].index].endswith("[1]")  # type: ignore[union-attr]
    assert [one.quote for one in annotations] == QUOTES  # type: ignore[union-attr]
    assert response.tools[0].type == "file_search"


def test_results_are_left_out_where_nobody_asked_for_them(server: Running) -> None:
    response = server.client().responses.create(model=NAME, input=QUESTION, tools=[TOOL], tool_choice="required")
    assert response.output[0].type == "file_search_call" and response.output[0].results is None


def test_a_stream_of_a_response_tells_of_the_search_and_of_annotations(server: Running) -> None:
    chosen: Any = {"type": "file_search"}
    create = server.client().responses.create
    events = list(create(model=NAME, input=QUESTION, tools=[TOOL], tool_choice=chosen, stream=True))
    kinds = [event.type for event in events]
    assert kinds[2:7] == [
        "response.output_item.added",
        "response.file_search_call.in_progress",
        "response.file_search_call.searching",
        "response.file_search_call.completed",
        "response.output_item.done",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    added = [event for event in events if event.type == "response.output_text.annotation.added"]
    assert [event.annotation_index for event in added] == [0, 1]
    assert kinds.index("response.output_text.annotation.added") < kinds.index("response.output_text.done")
    whole = events[-1].response  # type: ignore[union-attr]
    assert whole.output[1].content[0].annotations[1].filename == "cities.md"


def test_a_response_that_searched_can_be_continued(server: Running) -> None:
    client = server.client()
    first = client.responses.create(model=NAME, input=QUESTION, tools=[TOOL])
    second = client.responses.create(model=NAME, input="And then?", previous_response_id=first.id)
    assert second.output_text == ANSWER and not second.output[0].type.startswith("file")
    sent: Any = [*(item.model_dump() for item in first.output), {"role": "user", "content": "And then?"}]
    assert client.responses.create(model=NAME, input=sent).output_text == ANSWER
    ran = client.responses.create(model=NAME, input=QUESTION, tools=[TOOL], background=True)
    server.until(lambda: client.responses.retrieve(ran.id).status == "completed")
    assert client.responses.retrieve(ran.id).output[0].type == "file_search_call"


def message(server: Running, **fields: Any) -> Any:
    body = {"model": NAME, "max_tokens": 200, "messages": [{"role": "user", "content": QUESTION}], "tools": [TOOL]}
    return server.post("/v1/messages", body | fields, headers={"anthropic-version": "2023-06-01"})


def test_a_message_has_the_search_as_blocks_and_citations(server: Running) -> None:
    use, results, text = message(server).json()["content"]
    assert use["type"] == "server_tool_use" and use["input"] == {"query": QUESTION}
    assert results["tool_use_id"] == use["id"]
    assert [one["type"] for one in results["content"]] == ["search_result", "search_result"]
    assert text["text"] == ANSWER
    assert [one["type"] for one in text["citations"]] == ["search_result_location"] * 2
    assert [one["cited_text"] for one in text["citations"]] == QUOTES
    for one in text["citations"]:
        result = results["content"][one["search_result_index"]]
        assert (one["source"], one["title"]) == (result["source"], result["title"])
        assert one["cited_text"] in result["content"][one["start_block_index"]]["text"]


def test_a_stream_of_a_message_has_citation_deltas(server: Running) -> None:
    lines = message(server, stream=True).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    starts = [event["content_block"]["type"] for event in events if event["type"] == "content_block_start"]
    assert starts == ["server_tool_use", "file_search_tool_result", "text"]
    deltas = [event for event in events if event["type"] == "content_block_delta"]
    assert {event["index"] for event in deltas} == {2}
    cited = [event["delta"]["citation"] for event in deltas if event["delta"]["type"] == "citations_delta"]
    assert [one["cited_text"] for one in cited] == QUOTES
    stops = [event["index"] for event in events if event["type"] == "content_block_stop"]
    assert stops == [0, 1, 2]


def test_a_message_that_searched_can_be_sent_back_and_kept_as_a_thread(server: Running) -> None:
    first = message(server, thread={"type": "create"}).json()
    turns = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": first["content"]},
        {"role": "user", "content": "And then?"},
    ]
    again = message(server, messages=turns)
    assert again.status_code == 200 and again.json()["content"][0]["input"] == {"query": "And then?"}
    thread = {"type": "continue", "previous_message_id": first["id"]}
    resumed = message(server, messages=turns[2:], thread=thread, tools=None)
    assert resumed.status_code == 200, resumed.text
    assert resumed.json()["content"][0]["type"] == "server_tool_use", "the tools of a thread are those it began with"


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
@pytest.mark.parametrize("wrong", [{"vector_store_ids": ["no"]}, {"max_num_results": 0}, {"filters": {"type": "eq"}}])
def test_wrong_searches_are_refused(server: Running, path: str, wrong: dict[str, Any]) -> None:
    body: dict[str, Any] = {"input": QUESTION, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 3}
    assert server.post(path, body | {"tools": [TOOL | wrong]}).status_code == 400


def test_a_conversation_that_is_shortened_still_has_its_passages(server: Running) -> None:
    turns: Any = [{"role": role, "content": "number " * 900} for role in ("user", "assistant")] * 3
    turns.append({"role": "user", "content": QUESTION})
    client = server.client()
    response = client.responses.create(model=NAME, input=turns, tools=[TOOL], truncation="auto", max_output_tokens=80)
    message: Any = response.output[1]
    assert [one.quote for one in message.content[0].annotations] == QUOTES
