"""Knowledge bases of a server: searched by routes and by requests for text, shown to the model as data, and cited."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import moesaic
from moesaic import Engine
from moesaic.serve.api.keys import Keys
from moesaic.serve.api.know.passages_prompt import INSTRUCTIONS
from moesaic.serve.api.know.sources import instruct
from moesaic.serve.api.knowledge import Bases
from tests.peers.scripted import saying
from tests.serve.api.listed_knowledge import TEXTS, ListedKnowledge
from tests.serve.api.running import NAME, Running, running
from tests.serve.made import talking_model

QUESTION = [{"role": "user", "content": "Where does the Danube end?"}]
SEARCH = {"type": "file_search"}
ANSWER = "It ends in the Black Sea [1]. Graz is far [9]."


@pytest.fixture(scope="module")
def new_engine(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Engine]:
    """Of a model with room for passages."""
    model = moesaic.load(talking_model(tmp_path_factory.mktemp("roomy") / "tiny", context=2048), threads=1)
    return lambda **options: Engine(model, **{"cache_bytes": 16 << 20, "seed": 0} | options)


@pytest.fixture(scope="module")
def knowledge() -> ListedKnowledge:
    return ListedKnowledge()


@pytest.fixture(scope="module")
def server(new_engine: Callable[..., Engine], knowledge: ListedKnowledge) -> Iterator[Running]:
    kitchen = ListedKnowledge([("soup.md", "Soup", "Soup is boiled.")])
    with running(new_engine(), knowledge=Bases({"travel": knowledge, "kitchen": kitchen})) as found:
        yield found


def chat(server: Running, said: str = ANSWER, **fields: Any) -> dict[str, Any]:
    body = {"model": NAME, "messages": QUESTION, "tools": [SEARCH | {"vector_store_ids": ["travel"]}], **fields}
    with saying(server, said):
        answer = server.post("/v1/chat/completions", body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_passages_are_found_with_where_they_stand(server: Running) -> None:
    body = {"query": "Where does the Danube end?", "k": 2, "base": "travel", "method": "words"}
    found = server.post("/v1/know/search", body).json()
    assert [one["source"] for one in found["data"]] == ["rivers.md", "cities.md"]
    first = found["data"][0]
    assert first["text"] == TEXTS[0][2] and first["end"] - first["start"] == len(first["text"])
    everything = server.post("/v1/know/search", {"query": "soup", "k": 50}).json()["data"]
    assert {one["base"] for one in everything} == {"travel", "kitchen"} and len(everything) == 4


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"query": ""}, "query"),
        ({"query": "x" * 4097}, "query"),
        ({"query": "x", "k": 0}, "k"),
        ({"query": "x", "k": 51}, "k"),
        ({"query": "x", "base": "nowhere"}, "base"),
        ({"query": "x", "method": "magic"}, "method"),
        ({"k": 3}, "query"),
    ],
)
def test_wrong_searches_are_refused_by_name(server: Running, wrong: dict[str, Any], param: str) -> None:
    answer = server.post("/v1/know/search", wrong)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_bases_are_listed_and_openais_client_searches_them(server: Running) -> None:
    with server.http() as http:
        assert [one["id"] for one in http.get("/v1/know").json()["data"]] == ["travel", "kitchen"]
    client = server.client()
    assert [store.id for store in client.vector_stores.list()] == ["travel", "kitchen"]
    page = client.vector_stores.search("travel", query="flour and water", max_num_results=1)
    assert page.data[0].filename == "food/bread.txt" and page.data[0].content[0].text == TEXTS[2][2]


def test_a_chat_is_answered_from_passages_and_cites_them(server: Running, knowledge: ListedKnowledge) -> None:
    answer = chat(server)
    message = answer["choices"][0]["message"]
    assert message["content"] == ANSWER
    (annotation,) = message["annotations"]  # there is no ninth passage
    cited = annotation["url_citation"]
    assert ANSWER[cited["start_index"] : cited["end_index"]] == "[1]"
    assert (cited["title"], cited["url"], cited["quote"]) == ("Rivers", "rivers.md", "It ends in the Black Sea.")
    text = "x" * 100 + TEXTS[0][2]
    assert text[cited["quote_start"] : cited["quote_end"]] == cited["quote"]
    assert answer["search_results"][0]["snippet"] == TEXTS[0][2]
    assert knowledge.seen[-1] == (QUESTION[0]["content"], 5, "auto")
    assert all("know" in thread for thread in knowledge.threads), "no search holds up the event loop"


def test_a_stream_has_results_first_and_annotations_last(server: Running) -> None:
    client = server.client()
    with saying(server, ANSWER):
        tools: Any = [SEARCH]
        chunks = list(client.chat.completions.create(model=NAME, messages=QUESTION, tools=tools, stream=True))  # type: ignore[call-overload]
    assert chunks[0].search_results[0]["url"] == "rivers.md"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ANSWER
    told = [chunk for chunk in chunks if getattr(chunk.choices[0].delta, "annotations", None)]
    assert told == [chunks[-2]]
    assert told[0].choices[0].delta.annotations[0]["url_citation"]["quote"] == "It ends in the Black Sea."
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_openais_client_reads_the_annotations(server: Running) -> None:
    with saying(server, ANSWER):
        tools: Any = [SEARCH]
        answer = server.client().chat.completions.create(model=NAME, messages=QUESTION, tools=tools)  # type: ignore[call-overload]
    assert answer.choices[0].message.annotations[0].url_citation.url == "rivers.md"


def test_the_model_writes_the_query_where_it_is_asked_to(server: Running, knowledge: ListedKnowledge) -> None:
    with saying(server, '{"query": "the mouth of the Danube"}'):
        body = {"messages": QUESTION, "tools": [SEARCH | {"rewrite_query": True, "max_num_results": 2}]}
        answer = server.post("/v1/chat/completions", body)
    assert answer.status_code == 200
    assert knowledge.seen[-1][:2] == ("the mouth of the Danube", 2)


def test_no_search_without_a_wish_for_it(server: Running, knowledge: ListedKnowledge) -> None:
    before = len(knowledge.seen)
    for body in ({}, {"tools": [SEARCH], "tool_choice": "none"}):
        answer = server.post("/v1/chat/completions", {"messages": QUESTION, "max_tokens": 2, **body}).json()
        assert "search_results" not in answer and "annotations" not in answer["choices"][0]["message"]
    assert len(knowledge.seen) == before


@pytest.mark.parametrize(
    "wrong",
    [
        {"tools": [SEARCH | {"vector_store_ids": ["nowhere"]}]},
        {"tools": [SEARCH, SEARCH]},
        {"tools": [SEARCH | {"max_num_results": 51}]},
        {"tools": [SEARCH | {"filters": {"type": "eq"}}]},
        {"tools": [SEARCH | {"ranking_options": {"ranker": "magic"}}]},
        {"tools": [SEARCH], "messages": [{"role": "user", "content": " "}]},
        {"tools": [SEARCH], "messages": [{"role": "system", "content": "Be brief."}]},
        {"tools": [{"type": "web_search"}]},
    ],
)
def test_wrong_wishes_are_refused(server: Running, wrong: dict[str, Any]) -> None:
    answer = server.post("/v1/chat/completions", {"messages": QUESTION, "max_tokens": 2, **wrong})
    assert answer.status_code == 400 and answer.json()["error"]["param"]


def test_a_server_without_a_base_says_so(new_engine: Callable[..., Engine]) -> None:
    with running(new_engine()) as bare:
        answer = bare.post("/v1/chat/completions", {"messages": QUESTION, "tools": [SEARCH]})
        assert answer.status_code == 400 and "--know" in answer.json()["error"]["message"]
        assert bare.post("/v1/know/search", {"query": "x"}).status_code == 404


def test_passages_that_do_not_fit_are_left_out_and_the_first_is_cut(new_engine: Callable[..., Engine]) -> None:
    long = ListedKnowledge([("a", "A", "number " * 3000), ("b", "B", "number"), ("c", "C", "yes " * 50)])
    with running(new_engine(), knowledge=Bases({"long": long})) as server:
        answer = chat(
            server, "A [1].", tools=[SEARCH], messages=[{"role": "user", "content": "A number"}], max_tokens=8
        )
        results = answer["search_results"]
        assert [one["title"] for one in results][:1] == ["A"] and 80 < len(results[0]["snippet"]) < 21_000
        assert answer["usage"]["prompt_tokens"] < 2048
        assert ("number " * 3000).startswith(results[0]["snippet"])


def test_metrics_count_searches(server: Running) -> None:
    server.post("/v1/know/search", {"query": "soup", "base": "kitchen"})
    with server.http() as http:
        text = http.get("/metrics").text
    assert 'moesaic:know_passages{base="kitchen"} 1.0' in text
    counted = next(line for line in text.splitlines() if line.startswith('moesaic:know_search_seconds_count{base="k'))
    assert float(counted.split()[-1]) >= 1


def test_keys_and_limits_hold_for_searches(new_engine: Callable[..., Engine], tmp_path: Any) -> None:
    file = tmp_path / "keys"
    file.write_text("alice sk-alice rpm=1\n")
    with running(new_engine(), knowledge=Bases({"travel": ListedKnowledge()}), keys=Keys.read(file, None)) as server:
        for path, body in (
            ("/v1/know/search", {"query": "x"}),
            ("/mcp", {"jsonrpc": "2.0", "id": 1, "method": "ping"}),
        ):
            assert server.post(path, body).status_code == 401
        key = {"authorization": "Bearer sk-alice"}
        assert server.post("/v1/know/search", {"query": "x"}, headers=key).status_code == 200
        assert server.post("/v1/know/search", {"query": "x"}, headers=key).status_code == 429


def rpc(server: Running, method: str, params: Any = None, **headers: str) -> Any:
    body = {"jsonrpc": "2.0", "id": 7, "method": method, "params": params or {}}
    return server.post("/mcp", body, headers=headers)


def test_an_mcp_client_lists_searches_and_fetches(server: Running) -> None:
    begun = rpc(server, "initialize", {"protocolVersion": "2025-06-18", "capabilities": {}}).json()["result"]
    assert begun["protocolVersion"] == "2025-06-18" and "tools" in begun["capabilities"]
    assert server.post("/mcp", {"jsonrpc": "2.0", "method": "notifications/initialized"}).status_code == 202
    listed = rpc(server, "tools/list").json()["result"]["tools"]
    assert [tool["name"] for tool in listed] == ["search", "fetch"]
    assert all(tool["annotations"]["readOnlyHint"] for tool in listed)
    called = {"name": "search", "arguments": {"query": "flour", "k": 1, "base": "travel"}}
    found = rpc(server, "tools/call", called).json()["result"]
    (one,) = found["structuredContent"]["results"]
    assert json.loads(found["content"][0]["text"]) == found["structuredContent"]
    fetched = rpc(server, "tools/call", {"name": "fetch", "arguments": {"id": one["id"]}}).json()["result"]
    assert fetched["structuredContent"]["text"] == TEXTS[2][2]


def test_mcp_refuses_what_is_wrong(server: Running) -> None:
    assert rpc(server, "tools/call", {"name": "search", "arguments": {"query": ""}}).json()["result"]["isError"]
    assert rpc(server, "tools/call", {"name": "fetch", "arguments": {"id": "none"}}).json()["result"]["isError"]
    assert rpc(server, "tools/call", {"name": "delete"}).json()["error"]["code"] == -32602
    assert rpc(server, "nothing").json()["error"]["code"] == -32601
    assert rpc(server, "ping", origin="https://evil.example").status_code == 403
    assert rpc(server, "ping", origin=server.url).json()["result"] == {}
    with server.http() as http:
        assert http.get("/mcp").status_code == 405
    assert server.post("/mcp", [1]).status_code == 400


def prompt_of(server: Running, messages: list[dict[str, Any]]) -> str:
    asked = chat(server, "No.", messages=messages, return_token_ids=True)
    return server.service.tokenizer.decode(asked["prompt_token_ids"], special=True)


def test_instructions_are_of_the_system_and_passages_stand_before_the_question(server: Running) -> None:
    alone = prompt_of(server, QUESTION)
    assert alone.count(INSTRUCTIONS) == 1 and alone.index(INSTRUCTIONS) < alone.index("<passages>")
    assert alone.index("</passages>") < alone.index("Question: Where does the Danube end?")
    own = {"role": "system", "content": "Be brief."}
    before = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Yes?"}]
    longer = prompt_of(server, [own, *before, *QUESTION])
    assert f"Be brief.\n\n{INSTRUCTIONS}" in longer and longer.index("Hello") < longer.index("<passages>")


def test_a_template_without_a_system_prompt_has_them_in_the_question(server: Running) -> None:
    plain = server.service.tokenizer.with_template(
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "{{ m.role }}: {{ m.content }}\n{% endfor %}"
    )
    assert not instruct(False, plain) and instruct(False, server.service.tokenizer)


def test_all_models_of_a_server_share_its_bases(new_engine: Callable[..., Engine]) -> None:
    base = ListedKnowledge()
    with running(new_engine(), also={"other": new_engine()}, knowledge=Bases({"travel": base})) as server:
        answer = chat(server, tools=[SEARCH], model="other")
        assert answer["model"] == "other" and answer["choices"][0]["message"]["annotations"]
        with server.http() as http:
            lines = http.get("/metrics").text.splitlines()
    assert len(base.seen) == 1
    assert lines.count('moesaic:know_passages{base="travel"} 3.0') == 1
