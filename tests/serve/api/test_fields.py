"""A field of a body is used, refused by its name, or named in a header as ignored: none vanishes in silence."""

from __future__ import annotations

from typing import Any

import pytest

from moesaic.serve.api.fields import MOST_NAMES, Received, unused
from moesaic.serve.api.schema.chat import ChatCompletionRequest
from moesaic.serve.api.schema.completions import CompletionRequest
from moesaic.serve.api.schema.not_offered import NOT_OFFERED
from tests.serve.api.running import Running

HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "yes"}], "max_tokens": 2}
HEADER = "x-moesaic-ignored"


def test_unknown_fields_are_named_in_the_header(server: Running) -> None:
    body = HELLO | {"no_such": 1, "messages": [{"role": "user", "content": "yes", "mood": "good"}]}
    for stream in (False, True):
        answer = server.post("/v1/chat/completions", body | {"stream": stream})
        assert answer.status_code == 200
        assert sorted(answer.headers[HEADER].split(", ")) == ["messages.0.mood", "no_such"]


def test_known_fields_are_not(server: Running) -> None:
    schema = {"name": "x", "schema": {"type": "integer", "anything": 1}}
    body = HELLO | {"response_format": {"type": "json_schema", "json_schema": schema}, "user": "me"}
    answer = server.post("/v1/chat/completions", body)
    assert answer.status_code == 200
    assert HEADER not in answer.headers
    assert HEADER not in server.post("/tokenize", {"prompt": "yes"}).headers


@pytest.mark.parametrize("path", ["/v1/embeddings", "/tokenize", "/v1/responses", "/v1/completions"])
def test_every_route_names_them(server: Running, path: str) -> None:
    body = {"input": "yes", "prompt": "yes", "max_tokens": 1, "max_output_tokens": 1, "no_such": None}
    if path == "/v1/responses":
        del body["prompt"]
    answer = server.post(path, body)
    assert answer.status_code == 200
    assert "no_such" in answer.headers[HEADER].split(", ")


def test_an_error_names_them_too(server: Running) -> None:
    answer = server.post("/v1/chat/completions", HELLO | {"model": "other", "no_such": 1})
    assert answer.status_code == 404
    assert answer.headers[HEADER] == "no_such"


@pytest.mark.parametrize("name", [name for name in NOT_OFFERED if "." not in name])
def test_what_would_change_the_answer_is_refused_by_name(server: Running, name: str) -> None:
    if name in ChatCompletionRequest.model_fields:
        return  # it is offered, and others test it
    answer = server.post("/v1/chat/completions", HELLO | {name: ["x"]})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == (name, "unsupported_parameter")
    assert NOT_OFFERED[name].instead in error["message"]
    neutral = server.post("/v1/chat/completions", HELLO | {name: None})
    assert neutral.status_code == 200
    assert neutral.headers[HEADER] == name


def test_a_value_that_changes_nothing_is_not_refused() -> None:
    assert not NOT_OFFERED["typical_p"].matters(1.0)
    assert NOT_OFFERED["typical_p"].matters(0.5)
    assert not NOT_OFFERED["modalities"].matters(["text"])


def test_names_of_clients_cannot_break_out_of_the_header(server: Running) -> None:
    evil = "x\r\nset-cookie: a=b"
    answer = server.post("/v1/chat/completions", HELLO | {evil: 1, "é, ü": 2, "y" * 10_000: 3})
    assert answer.status_code == 200
    assert "set-cookie" not in answer.headers
    assert answer.headers[HEADER].isascii()
    assert len(answer.headers[HEADER]) < 400


def test_the_header_is_bounded(server: Running) -> None:
    answer = server.post("/v1/chat/completions", HELLO | {f"field_{number}": 1 for number in range(1000)})
    names = answer.headers[HEADER].split(", ")
    assert len(names) == MOST_NAMES + 1
    assert names[-1] == f"... {1000 - MOST_NAMES} more"


def test_aliases_and_nested_names() -> None:
    content = {"prompt": "x", "structured_outputs": {"json": {"a": 1}, "whitespace": " "}}
    found = [name for name, _, _ in unused(content, CompletionRequest.model_validate(content))]
    assert found == ["structured_outputs.whitespace"]
    assert Received().header() == []


def test_a_whole_number_may_be_written_with_a_point_or_an_exponent(server: Running) -> None:
    with server.http() as client:
        for number in ("2.0", "2", "2e0", "0.2e1"):
            body = b'{"prompt":"1.0, yes","max_tokens": %s ,"temperature":1.0}' % number.encode()
            answer = client.post("/v1/completions", content=body, headers={"content-type": "application/json"})
            assert answer.status_code == 200, number
            assert answer.json()["usage"]["completion_tokens"] <= 2
        wrong = client.post("/v1/completions", json={"prompt": "yes", "max_tokens": 2.5})
        assert wrong.status_code == 400
    tokens = server.post("/tokenize", {"prompt": "a,1.0,[1e3]"}).json()["tokens"]
    assert server.post("/detokenize", {"tokens": [float(token) for token in tokens]}).json()["prompt"] == "a,1.0,[1e3]"
