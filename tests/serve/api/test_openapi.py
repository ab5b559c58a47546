"""Requests made from the OpenAPI document, right ones and wrong ones: the answers are what the document says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from jsonschema import Draft202012Validator
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from tests.serve.api.running import NAME, Running
from tests.waiting import PATIENCE


def conforms(case: Any) -> bool:
    """Whether a body is one of the forms that the document allows."""
    (form,) = (media["schema"] for media in case.operation.definition.raw["requestBody"]["content"].values())
    components = case.operation.schema.raw_schema["components"]
    return bool(Draft202012Validator({**form, "components": components}).is_valid(case.body))


def violations_are_refused(context: Any, response: Any, case: Any) -> bool | None:
    """Where a body may have several forms, one that breaks a rule of the first may be right in the second."""
    if "requestBody" in case.operation.definition.raw and conforms(case):
        return None
    return negative_data_rejection(context, response, case)


CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    violations_are_refused,
]
LIMITS = {"max_tokens": 4, "max_completion_tokens": 4, "max_output_tokens": 4, "n": 2, "best_of": 2}


@pytest.fixture(scope="module")
def document(server: Running) -> Iterator[Any]:
    yield schemathesis.openapi.from_url(f"{server.url}/openapi.json", timeout=PATIENCE)
    server.until(lambda: server.idle)
    server.until(lambda: not server.tasks())


OPERATIONS = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/responses"),
    ("POST", "/v1/responses/input_tokens"),
    ("GET", "/v1/responses/{response_id}"),
    ("DELETE", "/v1/responses/{response_id}"),
    ("POST", "/v1/responses/{response_id}/cancel"),
    ("GET", "/v1/responses/{response_id}/input_items"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"),
    ("POST", "/v1/embeddings"),
    ("POST", "/pooling"),
    ("POST", "/v1/rerank"),
    ("POST", "/v1/score"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("POST", "/apply-template"),
    ("GET", "/tokenizer_info"),
    ("POST", "/generate"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{model}"),
    ("GET", "/health"),
    ("GET", "/ping"),
    ("GET", "/load"),
    ("GET", "/ready"),
    ("GET", "/version"),
    ("GET", "/metrics"),
    ("GET", "/live"),
]


def test_the_document_is_whole(document: Any) -> None:
    found = [(operation.ok().method.upper(), operation.ok().path) for operation in document.get_all_operations()]
    assert sorted(found) == sorted(OPERATIONS)


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_answers_are_as_documented(document: Any, method: str, path: str, mode: GenerationMode) -> None:
    if (method != "POST" or path.endswith("/cancel")) and mode is GenerationMode.NEGATIVE:
        return  # there is nothing to get wrong
    many = method == "POST"

    @settings(
        max_examples=25 if many else 4,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=document[path][method].as_strategy(generation_mode=mode))
    def check(case: Any) -> None:
        shorten(case)
        if mode is GenerationMode.POSITIVE:
            sense(case)
        case.call_and_validate(checks=CHECKS)

    check()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_every_event_of_a_stream_is_as_documented(document: Any, path: str) -> None:
    body: dict[str, Any] = {"model": NAME, "stream": True}
    if path == "/v1/chat/completions":
        body |= {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    elif path == "/v1/completions":
        body |= {"prompt": "Hello", "max_tokens": 4}
    else:
        body |= {"input": "Hello", "max_output_tokens": 4}
    answer = (
        document[path]["POST"]
        .Case(body=body, media_type="application/json")
        .call_and_validate(checks=CHECKS, timeout=PATIENCE)
    )
    assert answer.status_code == 200
    assert answer.headers["content-type"][0].startswith("text/event-stream")


def sense(case: Any) -> None:
    """Names the document leaves open, as this server knows them; else nearly all would be refused for these alone."""
    if not isinstance(case.body, dict):
        return
    if "model" in case.body:
        case.body["model"] = NAME
    if not case.body.get("logprobs"):
        case.body.pop("top_logprobs", None)
    for message in [*(case.body.get("messages") or ()), *(case.body.get("input") or ())]:
        if isinstance(message, dict) and "role" in message:
            message["role"] = "user"


def shorten(case: Any) -> None:
    """What may be long shall be short."""
    if not isinstance(case.body, dict):
        return
    for name, most in LIMITS.items():
        if isinstance(case.body.get(name), int) and case.body[name] > most:
            case.body[name] = most
    if case.path.startswith("/v1/chat"):
        case.body.setdefault("max_tokens", 4)
    elif case.path == "/v1/responses":
        case.body.setdefault("max_output_tokens", 4)


def test_other_forms_of_a_body(document: Any) -> None:
    """Which of them requests made at random meet differs from run to run."""
    for path, body in (
        ("/v1/completions", {"prompt_token_ids": [5], "max_tokens": 2}),
        ("/v1/rerank", {"query": "yes", "texts": ["no"]}),
    ):
        case = document[path]["POST"].Case(body=body, media_type="application/json")
        assert conforms(case)
        assert case.call_and_validate(checks=CHECKS, timeout=PATIENCE).status_code == 200
    assert not conforms(document["/v1/completions"]["POST"].Case(body={"max_tokens": 2}, media_type="application/json"))
