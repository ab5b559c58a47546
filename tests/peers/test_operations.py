"""Keys, ids, names, adapters, probes and metrics, as the suites of llama.cpp (test_security, test_basic, test_metrics,
test_ctx_shift, test_lora), vLLM (serve/*, models, lora) and SGLang (openai_server/validation) have them."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from moesaic.serve.api.keys import Keys
from moesaic.serve.core.engine import Engine
from tests.serve.api.running import NAME, Running, running
from tests.serve.api.test_adapters import write_adapter

TALK: dict[str, Any] = {"messages": [{"role": "user", "content": "yes"}], "max_tokens": 4}
KEY = "sk-this-is-the-secret-key"


@pytest.fixture(scope="module")
def guarded(new_engine: Callable[..., Engine], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """With a key, several names, adapters that clients may load, and pages of another origin."""
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text(f"alice {KEY}\n")
    settings: dict[str, Any] = {"keys": Keys.read(file, None, given=["sk-second"]), "aliases": ("small", "fim")}
    settings |= {"allow_adapters": True, "cors_origins": ("https://web.mydomain.example",), "metrics_names": "vllm"}
    with running(new_engine(), **settings) as found:
        yield found


@pytest.fixture
def http(guarded: Running) -> Iterator[httpx.Client]:
    with guarded.http(headers={"authorization": f"Bearer {KEY}"}) as found:
        yield found


# llama.cpp: test_security


@pytest.mark.parametrize("path", ["/health", "/ping", "/version", "/ready"])
def test_probes_need_no_key(guarded: Running, path: str) -> None:
    with guarded.http() as client:
        answer = client.get(path)
    assert answer.status_code == 200
    assert "error" not in answer.json()


def test_the_page_needs_no_key(guarded: Running) -> None:
    with guarded.http() as client:
        page = client.get("/")
    assert page.status_code == 200
    assert "<!doctype html>" in page.text.lower()


@pytest.mark.parametrize("key", [None, "invalid-key", "-", KEY[:-1], KEY.upper()])
def test_a_wrong_key(guarded: Running, key: str | None) -> None:
    headers = {"authorization": f"Bearer {key}"} if key is not None else {}
    answer = guarded.post("/v1/completions", {"prompt": "x"}, headers=headers)
    assert answer.status_code == 401
    assert answer.json()["error"]["type"] == "authentication_error"
    assert KEY not in answer.text


@pytest.mark.parametrize(
    "headers", [{"authorization": f"Bearer {KEY}"}, {"x-api-key": KEY}, {"authorization": "Bearer sk-second"}]
)
def test_a_right_key_in_either_header(guarded: Running, headers: dict[str, str]) -> None:
    assert guarded.post("/v1/completions", {"prompt": "x", "max_tokens": 1}, headers=headers).status_code == 200


def test_the_openai_client_with_its_key(guarded: Running) -> None:
    answer = guarded.client(KEY).chat.completions.create(model=NAME, **TALK)
    assert len(answer.choices) == 1
    with pytest.raises(openai.AuthenticationError):
        guarded.client("no").chat.completions.create(model=NAME, **TALK)


def test_preflight_of_a_page_that_may(guarded: Running) -> None:
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    with guarded.http() as client:
        good = client.options("/v1/completions", headers=asked | {"origin": "https://web.mydomain.example"})
        evil = client.options("/v1/completions", headers=asked | {"origin": "https://localhost.evil.example"})
    assert good.status_code == 200
    assert good.headers["access-control-allow-origin"] == "https://web.mydomain.example"
    assert "POST" in good.headers["access-control-allow-methods"]
    assert "authorization" in good.headers["access-control-allow-headers"].lower()
    assert "access-control-allow-origin" not in evil.headers


# vLLM: test_authentication_middleware


def test_every_route_is_guarded(guarded: Running, http: httpx.Client) -> None:
    paths = http.get("/openapi.json").json()["paths"]
    assert len(paths) > 15
    with guarded.http() as client:
        for path, methods in paths.items():
            for method in methods:
                answer = client.request(method, path.replace("{", "").replace("}", ""))
                is_open = path in ("/health", "/ping", "/version", "/ready")
                assert (answer.status_code == 401) == (not is_open), (method, path)


@pytest.mark.parametrize(
    "path", ["//v1/models", "/v1/../v1/models", "/V1/models", "/v1/models/", "/health/../v1/models"]
)
def test_no_spelling_of_a_path_gets_around_the_key(guarded: Running, path: str) -> None:
    host, port = guarded.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as raw:
        raw.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        head = raw.makefile("rb").readline()
    assert b" 401 " in head


# DNS rebinding and frames, which none of the three checks


def test_a_strange_host_is_refused_where_there_is_no_key(server: Running, guarded: Running) -> None:
    for host, status in (("evil.example", 403), ("evil.example:8000", 403), ("localhost:1", 200), ("[::1]:1", 200)):
        with server.http(headers={"host": host}) as client:
            answer = client.get("/v1/models")
            assert answer.status_code == status, host
            if status == 403:
                assert answer.json()["error"]["code"] == "host_not_allowed"
                assert "--allowed-host" in answer.json()["error"]["message"]
    with guarded.http(headers={"host": "api.example", "authorization": f"Bearer {KEY}"}) as client:
        assert client.get("/v1/models").status_code == 200


def test_a_host_that_was_named_is_not(new_engine: Callable[..., Engine]) -> None:
    with running(new_engine(), allowed_hosts=("My.Example",)) as named:
        with named.http(headers={"host": "my.example:80"}) as client:
            assert client.get("/v1/models").status_code == 200
        with named.http(headers={"host": "my.example.evil"}) as client:
            assert client.get("/v1/models").status_code == 403


def test_responses_cannot_be_framed_or_sniffed(server: Running) -> None:
    with server.http() as client:
        for path in ("/", "/v1/models", "/nothing"):
            headers = client.get(path).headers
            assert headers["x-frame-options"] == "DENY"
            assert headers["x-content-type-options"] == "nosniff"
            assert headers["referrer-policy"] == "no-referrer"
            assert "frame-ancestors 'none'" in headers["content-security-policy"]


# vLLM: x_request_id, basic


def test_request_ids(server: Running) -> None:
    given = server.post("/v1/chat/completions", TALK, headers={"x-request-id": "my-id-7"})
    assert given.headers["x-request-id"] == "my-id-7"
    made = [server.post("/v1/chat/completions", TALK | {"stream": stream}) for stream in (False, True)]
    assert len({answer.headers["x-request-id"] for answer in made}) == 2
    assert all(len(answer.headers["x-request-id"]) == 32 for answer in made)
    refused = server.post("/v1/chat/completions", {}, headers={"x-request-id": "i" * 500})
    assert refused.status_code == 400
    assert len(refused.headers["x-request-id"]) == 32


def test_the_fingerprint_is_the_same_everywhere(server: Running, client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=NAME, **TALK).system_fingerprint
    chunks = [chunk.system_fingerprint for chunk in client.chat.completions.create(model=NAME, stream=True, **TALK)]
    other = client.completions.create(model=NAME, prompt="x", max_tokens=1).system_fingerprint
    assert whole is not None
    assert whole.startswith("fp_")
    assert {whole, other, *chunks} == {whole}


def test_a_wrong_content_type(server: Running) -> None:
    with server.http() as client:
        form = client.post("/v1/completions", content=b'{"prompt":"x"}', headers={"content-type": "text/plain"})
    assert form.status_code == 400
    assert "application/json" in form.json()["error"]["message"]


def test_the_load_of_a_server(server: Running) -> None:
    with server.http() as client:
        assert client.get("/load").json() == {"server_load": 0}
        server.hold.until(server.engine.counts.generated_tokens + 1)
        with client.stream("POST", "/v1/chat/completions", json=TALK | {"stream": True}) as stream:
            lines = stream.iter_lines()
            next(lines)
            with server.http() as other:
                found = other.get("/load").json()
            server.hold.release()
            list(lines)
        assert found == {"server_load": 1}
        assert client.get("/load").json() == {"server_load": 0}


def test_stream_options_need_a_stream(server: Running) -> None:
    for path, body in (("chat/completions", TALK), ("completions", {"prompt": "x", "max_tokens": 1})):
        options = {"stream_options": {"include_usage": True}}
        refused = server.post(f"/v1/{path}", body | options)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "stream_options")
        assert server.post(f"/v1/{path}", body | options | {"stream": True}).status_code == 200


# Below the application


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"GET /health HTTP/1.1\r\n\r\n", 400),  # no host
        (b"nonsense\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nBad Header: x\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 200_000 + b"\r\n\r\n", 431),
        (b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n", 400),
        (b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n{}", 400),
    ],
)
def test_what_is_no_http_is_answered_like_any_error(server: Running, raw: bytes, status: int) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(raw)
        connection.shutdown(socket.SHUT_WR)
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status)
    assert b"content-type: application/json" in head.lower()
    assert b"x-request-id" in head.lower()
    assert json.loads(body)["error"]["code"] == "invalid_http"


# Names: llama.cpp's test_basic, vLLM's test_models


def test_aliases(guarded: Running, http: httpx.Client) -> None:
    cards = {card["id"]: card for card in http.get("/v1/models").json()["data"]}
    assert {NAME, "small", "fim"} <= set(cards)
    assert {cards[name]["root"] for name in (NAME, "small", "fim")} == {NAME}
    assert set(cards[NAME]["aliases"]) == {"small", "fim"}
    for name in ("small", "fim"):
        answer = http.post("/v1/chat/completions", json=TALK | {"model": name})
        assert answer.json()["model"] == name
    assert http.get("/models").json() == http.get("/v1/models").json()
    assert http.get("/v1/models/small").json()["id"] == "small"


def test_an_unknown_model(server: Running, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as refused:
        client.chat.completions.create(model="gpt-that-is-not-here", **TALK)
    assert refused.value.code == "model_not_found"
    assert refused.value.param == "model"


# Adapters: vLLM's test_lora_adapters, test_serving_models


def test_adapters_come_are_listed_are_replaced_and_go(http: httpx.Client, tmp_path: Path) -> None:
    first, second = (write_adapter(tmp_path / name, seed) for seed, name in enumerate(("a", "b"), 1))
    load = {"lora_name": "mine", "lora_path": str(first)}

    def said(model: str) -> str:
        body = {"model": model, "prompt": "The number 7 is", "temperature": 0, "max_tokens": 16, "ignore_eos": True}
        answer = http.post("/v1/completions", json=body)
        assert answer.status_code == 200
        return str(answer.json()["choices"][0]["text"])

    assert http.post("/v1/load_lora_adapter", json=load).status_code == 200
    card = http.get("/v1/models/mine").json()
    assert (card["parent"], card["root"]) == (NAME, NAME)
    before = said("mine")
    assert before != said(NAME)
    again = http.post("/v1/load_lora_adapter", json=load | {"lora_path": str(second)})
    assert (again.status_code, again.json()["error"]["code"]) == (400, "already_loaded")
    assert "load_inplace" in again.json()["error"]["message"]
    assert said("mine") == before
    replaced = http.post("/v1/load_lora_adapter", json=load | {"lora_path": str(second), "load_inplace": True})
    assert replaced.status_code == 200
    assert said("mine") != before
    assert http.post("/v1/unload_lora_adapter", json={"lora_name": "mine"}).status_code == 200
    assert http.post("/v1/unload_lora_adapter", json={"lora_name": "mine"}).status_code == 404
    assert http.post("/v1/completions", json={"model": "mine", "prompt": "x"}).status_code == 404


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"lora_name": "", "lora_path": ""}, 400),
        ({"lora_name": "x"}, 400),
        ({"lora_name": "notfound", "lora_path": "/not/an/adapter"}, 404),
        ({"lora_name": NAME, "lora_path": "/tmp"}, 400),
        ({"lora_name": "small", "lora_path": "/tmp"}, 400),
    ],
)
def test_loads_that_are_refused(http: httpx.Client, body: dict[str, str], status: int) -> None:
    assert http.post("/v1/load_lora_adapter", json=body).status_code == status


@pytest.mark.parametrize(
    ("change", "says"),
    [({"r": 1024}, "rank 2"), ({"bias": "all"}, "biases"), ({"use_dora": True}, "use_dora"), (None, "not JSON")],
)
def test_bad_adapters_are_refused_and_others_go_on(
    http: httpx.Client, tmp_path: Path, change: dict[str, Any] | None, says: str
) -> None:
    path = write_adapter(tmp_path / "bad", 1)
    file = path / "adapter_config.json"
    settings = httpx.Response(200, content=file.read_bytes()).json()
    file.write_text(
        "this is not json"
        if change is None
        else httpx.Request("GET", "http://x", json=settings | change).content.decode()
    )
    refused = http.post("/v1/load_lora_adapter", json={"lora_name": "bad", "lora_path": str(path)})
    assert refused.status_code == 400
    assert says in refused.json()["error"]["message"]
    assert str(tmp_path) not in refused.text
    assert http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}).status_code == 200


def test_many_adapters_side_by_side(http: httpx.Client, tmp_path: Path) -> None:
    path = str(write_adapter(tmp_path / "many", 3))
    names = [f"many-{number}" for number in range(6)]
    for name in names:
        assert http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path}).status_code == 200
    texts = set()
    for name in names:
        answer = http.post("/v1/completions", json={"model": name, "prompt": ["yes", "no"], "max_tokens": 5, "seed": 1})
        texts.add(tuple(choice["text"] for choice in answer.json()["choices"]))
    assert len(texts) == 1
    for name in names:
        http.post("/v1/unload_lora_adapter", json={"lora_name": name})


# Metrics: vLLM's and llama.cpp's test_metrics


def values(http: httpx.Client) -> dict[str, float]:
    text = http.get("/metrics").text
    assert KEY not in text
    families = list(text_string_to_metric_families(text))
    assert all(family.documentation and family.type != "unknown" for family in families)
    return {sample.name: sample.value for family in families for sample in family.samples if "le" not in sample.labels}


def test_metrics_count_what_was_used(http: httpx.Client) -> None:
    before = values(http)
    usage = [
        http.post("/v1/completions", json={"prompt": "I believe", "max_tokens": n}).json()["usage"] for n in (1, 4, 9)
    ]
    after = values(http)
    for name, field in (("prompt_tokens_total", "prompt_tokens"), ("generation_tokens_total", "completion_tokens")):
        used = sum(one[field] for one in usage)
        for prefix in ("vllm:", "moesaic:"):
            assert after[prefix + name] - before[prefix + name] == used
    assert after["vllm:time_to_first_token_seconds_count"] - before["vllm:time_to_first_token_seconds_count"] == 3
    assert after["vllm:num_requests_running"] == after["vllm:num_requests_waiting"] == 0


def test_embeddings_count_prompts_and_generate_nothing(http: httpx.Client) -> None:
    before = values(http)
    used = http.post("/v1/embeddings", json={"input": ["hello world", "goodbye"]}).json()["usage"]["prompt_tokens"]
    after = values(http)
    assert after["moesaic:prompt_tokens_total"] - before["moesaic:prompt_tokens_total"] == used
    assert after["moesaic:generation_tokens_total"] == before["moesaic:generation_tokens_total"]


def test_a_client_that_leaves_is_counted_and_nothing_stays(guarded: Running, http: httpx.Client) -> None:
    long = {"prompt": "x", "max_tokens": 400, "ignore_eos": True, "stream": True}
    before = values(http)
    guarded.hold.until(guarded.engine.counts.generated_tokens + 8)  # the first may show nothing: half a letter
    with guarded.http(headers={"authorization": f"Bearer {KEY}"}) as leaving:
        with leaving.stream("POST", "/v1/completions", json=long) as stream:
            next(stream.iter_lines())
    guarded.hold.release()
    guarded.until(lambda: guarded.idle)
    after = values(http)
    assert after["vllm:num_requests_running"] == 0
    assert after["vllm:kv_cache_usage_perc"] == 0
    assert guarded.engine.counts.aborted > 0
    assert after["vllm:generation_tokens_total"] - before["vllm:generation_tokens_total"] < 400


# Lengths: llama.cpp's test_ctx_shift, SGLang's test_request_length_validation and test_large_max_new_tokens


def test_a_prompt_beyond_the_context(server: Running) -> None:
    refused = server.post("/v1/completions", {"prompt": "word " * 300, "max_tokens": 4})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert "tokens" in refused.json()["error"]["message"]


def test_a_completion_ends_where_the_context_does(server: Running) -> None:
    context = server.service.context
    for wanted, count in ((64, 64), (100_000, None)):
        answer = server.post("/v1/completions", {"prompt": "Hi", "max_tokens": wanted, "ignore_eos": True}).json()
        assert answer["choices"][0]["finish_reason"] == "length"
        usage = answer["usage"]
        assert usage["completion_tokens"] == (count or context - usage["prompt_tokens"])
