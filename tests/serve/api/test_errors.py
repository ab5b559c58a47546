"""Whatever is wrong is answered in OpenAI's form, with the status its client knows."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from moesaic.serve.core.drafters.suffix import Suffix
from moesaic.serve.core.engine import Engine
from tests.serve.api.running import NAME, Running, running
from tests.waiting import PATIENCE

HELLO = {"messages": [{"role": "user", "content": "yes"}], "max_tokens": 2}


def tool(parameters: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


def schema(wish: dict[str, Any]) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": wish}}}


def facts(answer: httpx.Response) -> dict[str, Any]:
    assert answer.headers["content-type"] == "application/json"
    content = answer.json()
    assert set(content) == {"error"}
    assert set(content["error"]) == {"message", "type", "param", "code"}
    assert content["error"]["message"]
    return content["error"]


@pytest.mark.parametrize(
    ("change", "param", "code"),
    [
        ({"messages": []}, "messages", "invalid_value"),
        ({"messages": "hi"}, "messages", "invalid_value"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content", "invalid_value"),
        ({"messages": [{"content": "x"}]}, "messages.0.role", "missing_required_parameter"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0.type", None),
        ({"messages": [{"role": "user", "content": {"text": "x"}}]}, "messages.0.content", "invalid_value"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text", None),
        ({"messages": [{"role": "user"}]}, "messages.0.content", "invalid_value"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages", "invalid_value"),
        ({"messages": [{"role": "user", "content": "word " * 300}]}, "messages", "context_length_exceeded"),
        ({"messages": [{"role": "user", "content": "word " * 10_000}]}, "messages", "context_length_exceeded"),
        ({"temperature": -1}, "temperature", "invalid_value"),
        ({"temperature": "1"}, "temperature", "invalid_value"),
        ({"top_p": 0}, "top_p", "invalid_value"),
        ({"n": 0}, "n", "invalid_value"),
        ({"n": True}, "n", "invalid_value"),
        ({"max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"max_tokens": 1.5}, "max_tokens", "invalid_value"),
        ({"seed": 2**63}, "seed", "invalid_value"),
        ({"stop": [""]}, "stop", "invalid_value"),
        ({"stop": 3}, "stop", "invalid_value"),
        ({"top_logprobs": 3}, "top_logprobs", "invalid_value"),
        ({"logit_bias": [[1]]}, "logit_bias.0", "invalid_value"),
        ({"logit_bias": [[1.5, 1]]}, "logit_bias", "invalid_value"),
        ({"logit_bias": [["yes", "no"]]}, "logit_bias", "invalid_value"),
        ({"logit_bias": {"9999": 1}}, "logit_bias", "invalid_value"),
        ({"stop_token_ids": [9999]}, "stop_token_ids", "invalid_value"),
        ({"min_tokens": 3}, "min_tokens", "invalid_value"),
        ({"logit_bias": {"1": 1000}}, "logit_bias.1", "invalid_value"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name", "invalid_value"),
        ({"tools": [tool({"type": "string"})]}, "tools.0.function.parameters", "invalid_value"),
        (
            {"tools": [tool({}), tool({"properties": {"a": {"type": "no"}}})], "tool_choice": "required"},
            "tools.1.function.parameters",
            "invalid_value",
        ),
        ({"tools": [tool({})], "tool_choice": {"type": "function"}}, "tool_choice.function", None),
        ({"response_format": {"type": "xml"}}, "response_format.type", "invalid_value"),
        (schema({"type": "no"}), "response_format.json_schema.schema", "invalid_value"),
        ({"guided_regex": "("}, "guided_regex", "invalid_value"),
        ({"guided_choice": []}, "guided_choice", "invalid_value"),
        ({"guided_json": {"type": "no"}}, "guided_json", "invalid_value"),
        ({"structured_outputs": {"grammar": "start: x"}}, "structured_outputs.grammar", "invalid_value"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages", "invalid_value"),
        ({"chat_template_kwargs": {"bos_token": "x"}}, "chat_template_kwargs.bos_token", "invalid_value"),
        ({"stream": "yes"}, "stream", "invalid_value"),
    ],
)
def test_a_wrong_field_is_named(server: Running, change: dict[str, Any], param: str | None, code: str | None) -> None:
    answer = server.post("/v1/chat/completions", HELLO | change)
    assert answer.status_code == 400
    error = facts(answer)
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert code is None or error["code"] == code
    for inner in ("str:", "Input should", "validation", "input_value", "%json", "regex parse error", "('"):
        assert inner not in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "param", "says"),
    [
        ("completions", {"prompt": {"a": 1}}, "prompt", "expected text or a list, found keys with values"),
        ("completions", {"prompt": ["a"] * 3000}, "prompt", "at most 2048 entries, found 3000"),
        ("completions", {"prompt": [-1]}, "prompt.0", "must be at least 0, found -1"),
        ("completions", {"prompt": "x", "suffix": "y"}, "suffix", "no special tokens"),
        ("embeddings", {"input": ""}, "input", "is empty"),
        ("embeddings", {"input": ["yes", "", "no"]}, "input.1", "is empty"),
        ("embeddings", {"input": ["yes", "word " * 300]}, "input.1", "has 1200 tokens"),
        ("embeddings", {"input": [[5], [9999]]}, "input.1", "outside the vocabulary"),
        ("completions", {"prompt": ["yes", ""]}, "prompt.1", "is empty"),
        ("completions", {"prompt": ["yes", "word " * 10_000]}, "prompt.1", "and the model holds 512"),
        ("embeddings", {"input": "word " * 300}, "input", "has 1200 tokens"),
        ("responses", {"input": "word " * 300}, "input", "has 1205 tokens"),
        ("responses", {"input": [5]}, "input.0", "expected keys with values, found 5"),
        ("responses", {"input": [{"type": "photo"}]}, "input.0.type", "expected one of message, function_call"),
        ("responses", {"input": [{"type": {}}]}, "input.0.type", "expected message"),
        ("responses", {"input": [{"type": "function_call", "call_id": "a"}]}, "input.0.name", "missing"),
        ("responses", {"input": [{"role": "king", "content": "x"}]}, "input", "king"),
        ("responses", {"input": "x", "conversation": "y"}, "conversation", "not supported"),
        ("responses", {"input": "x", "prompt": {"id": "y"}}, "prompt", "not supported"),
        ("chat/completions", HELLO | {"chat_template": "x"}, "chat_template", "takes none from requests"),
        ("chat/completions", HELLO | {"functions": [{"name": "f"}], "tools": []}, "functions", "together with tools"),
        (
            "responses",
            {"input": "x", "text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "no"}}}},
            "text.format.schema",
            "cannot be followed",
        ),
        (
            "responses",
            {"input": "x", "tools": [{"type": "function", "name": "f", "parameters": {"type": "string"}}]},
            "tools.0.parameters",
            "object",
        ),
    ],
)
def test_fields_are_called_as_the_client_called_them(
    server: Running, path: str, body: dict[str, Any], param: str, says: str
) -> None:
    answer = server.post(f"/v1/{path}", body)
    assert answer.status_code == 400
    error = facts(answer)
    assert error["param"] == param
    assert says in error["message"]


@pytest.mark.parametrize(
    ("body", "kind", "status"),
    [
        (b"{", "application/json", 400),
        (b"", "application/json", 400),
        (b"[]", "application/json", 400),
        (b'"x"', "application/json", 400),
        (b"null", "application/json", 400),
        (b"\xff\xfe", "application/json", 400),
        (b"[" * 100_000, "application/json", 400),
        (b'{"messages":' + b"9" * 5000 + b"}", "application/json", 400),
        (b'{"messages":[{"role":"user","content":"\\ud800"}]}', "application/json", 400),
        (b'{"messages":[{"role":"user","content":"x"}],"temperature":NaN}', "application/json", 400),
        (b'{"messages":[{"role":"user","content":"x"}],"temperature":1e999}', "application/json", 400),
        (b'{"messages":[{"role":"user","content":"x"}]}', "text/plain", 400),
        (b"a=b", "application/x-www-form-urlencoded", 400),
        (b'{"messages":[{"role":"user","content":"x"}]}', None, 400),
    ],
)
def test_a_body_that_is_no_request(server: Running, body: bytes, kind: str | None, status: int) -> None:
    with server.http() as client:
        headers = {"content-type": kind} if kind else {}
        for path in ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/tokenize"):
            answer = client.post(path, content=body, headers=headers)
            assert answer.status_code == status
            facts(answer)


def test_what_is_no_json_is_refused_however_the_type_is_written(server: Running) -> None:
    tool = b'{"type":"function","name":"f","parameters":{"type":"object","minProperties":NaN}}'
    with server.http() as client:
        for kind in ("application/json", "Application/JSON; charset=utf-8"):
            body = b'{"input":"x","max_output_tokens":1,"tools":[' + tool + b"]}"
            assert (
                facts(client.post("/v1/responses", content=body, headers={"content-type": kind}))["code"]
                == "invalid_json"
            )


def test_routes_and_methods(server: Running) -> None:
    with server.http() as client:
        assert facts(client.get("/v1/nothing"))["code"] == "unknown_route"
        assert client.get("/v1/nothing").status_code == 404
        assert "/v1" in facts(client.post("/chat/completions", json=HELLO))["message"]
        assert facts(client.get("/v1/models/some/other"))["code"] == "model_not_found"
        assert client.get("/v1/chat/completions").status_code == 405
        assert facts(client.delete("/v1/models"))["code"] == "method_not_allowed"
        assert client.options("/v1/models", headers={"origin": "http://x"}).status_code == 405


def test_head_is_get_without_a_body(server: Running) -> None:
    with server.http() as client:
        for path in ("/v1/models", f"/v1/models/{NAME}", "/health", "/version", "/", "/live/stream", "/openapi.json"):
            answer = client.head(path)
            assert (answer.status_code, answer.content) == (200, b"")
        assert client.head("/v1/models").headers["content-length"] == str(len(client.get("/v1/models").content))
        assert client.head("/v1/nothing").status_code == 404
        assert client.head("/v1/chat/completions").status_code == 405


def test_unknown_fields_are_ignored(server: Running) -> None:
    answer = server.post("/v1/chat/completions", HELLO | {"service_tier": "auto", "store": True, "no_such": {"a": 1}})
    assert answer.status_code == 200


def test_the_client_raises_what_it_should(server: Running) -> None:
    client = server.client()
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="other", messages=[{"role": "user", "content": "x"}])
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="has .* tokens"):
        client.chat.completions.create(model=NAME, messages=[{"role": "user", "content": "word " * 3000}])
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(
            model=NAME, messages=[{"role": "user", "content": "x"}], stream=True, temperature=-1
        )


def test_our_own_mistakes_are_not_told_but_survived(new_engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that fails loses its requests, and nothing else."""
    engine: Engine = new_engine(drafter=Suffix())
    accept, broken = engine._accept, [True]
    forgotten: list[Any] = []
    monkeypatch.setattr(engine.drafter, "finished", forgotten.append)

    def fail(*given: Any) -> Any:
        if broken and broken.pop():
            raise RuntimeError("a secret of ours")
        return accept(*given)

    monkeypatch.setattr(engine, "_accept", fail)
    with running(engine) as server:
        answer = server.post("/v1/chat/completions", HELLO)
        assert answer.status_code == 500
        assert facts(answer)["type"] == "server_error"
        assert "secret" not in answer.text
        broken.append(True)
        streamed = server.post("/v1/chat/completions", HELLO | {"stream": True})
        assert '"server_error"' in streamed.text
        assert streamed.text.endswith("data: [DONE]\n\n")
        assert server.post("/v1/chat/completions", HELLO).status_code == 200
    assert len(forgotten) == 3  # also those that were lost


def test_a_request_the_engine_cannot_take_is_answered(new_engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """And those beside it go on."""
    engine: Engine = new_engine()
    found, wanted = engine.page_pool.cached_prefix, "no"

    def fail(request: Any) -> Any:
        if wanted in engine.tokenizer.decode(request.prompt):  # type: ignore[union-attr]
            raise RuntimeError("a secret of ours")
        return found(request)

    monkeypatch.setattr(engine.page_pool, "cached_prefix", fail)
    with running(engine) as server, server.http() as client:
        with client.stream(
            "POST", "/v1/completions", json={"prompt": "yes", "max_tokens": 20, "stream": True}
        ) as beside:
            lines = beside.iter_lines()
            next(lines)
            answer = server.post("/v1/completions", {"prompt": ["no", "yes"], "max_tokens": 4}, timeout=PATIENCE)
            assert answer.status_code == 500 and facts(answer)["type"] == "server_error"
            assert "secret" not in answer.text
            assert list(lines)[-2] == "data: [DONE]"
        assert server.post("/v1/completions", {"prompt": "yes", "max_tokens": 2}).status_code == 200
