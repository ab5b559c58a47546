"""A model that sleeps has no process; it wakes as it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx

from moesaic.serve.api.keys import Keys, _hash
from moesaic.serve.cluster.launch import with_workers
from moesaic.serve.cluster.sleep import held
from tests.serve.cluster.over_http import Served, served
from tests.serve.cluster.workers import options

ADMIN = Keys(frozenset([_hash("secret")]))
SECRET = {"authorization": "Bearer secret"}
BODY: dict[str, Any] = {"prompt": "7 is a number", "max_tokens": 8, "temperature": 0, "ignore_eos": True}


def call(server: Served, path: str, **params: Any) -> dict[str, Any]:
    with server.http(headers=SECRET) as client:
        answer = client.post(path, params=params) if path != "/is_sleeping" else client.get(path)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def post(server: Served, path: str, body: dict[str, Any]) -> httpx.Response:
    with server.http() as client:
        return client.post(path, json=body)


def state(server: Served) -> str:
    with server.http() as client:
        lines = client.get("/metrics").text.splitlines()
    (found,) = [line for line in lines if line.startswith("moesaic:engine_sleep_state") and line.endswith(" 1.0")]
    return found.split('sleep_state="')[1].split('"')[0]


def test_sleep_and_wake(directory: Path) -> None:
    with served(with_workers([options(directory)]), admin_keys=ADMIN) as server:
        before = post(server, "/v1/completions", BODY).json()
        assert call(server, "/is_sleeping") == {"is_sleeping": False}
        for level, name in ((1, "weights_offloaded"), (2, "discard_all")):
            assert call(server, "/sleep", level=level) == {"status": "sleeping"}
            assert call(server, "/is_sleeping") == {"is_sleeping": True}
            assert state(server) == name
            assert server.service.loop.workers == []
            refused = post(server, "/v1/completions", BODY)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "sleeping")
            assert "retry-after" in refused.headers
            with server.http() as client:
                assert client.get("/ready").status_code == 503
                assert client.get("/health").status_code == 200
                assert client.get("/v1/models").status_code == 200
            assert call(server, "/sleep") == {"status": "sleeping"}  # it does already
            assert call(server, "/wake_up", tags=["weights"]) == {"status": "sleeping"}
            assert call(server, "/is_sleeping") == {"is_sleeping": True}
            assert call(server, "/wake_up", tags=["kv_cache"]) == {"status": "ready"}
            assert state(server) == "awake"
            again = post(server, "/v1/completions", BODY).json()
            assert again["choices"] == before["choices"]
            assert again["system_fingerprint"] == before["system_fingerprint"]
        with server.http(headers=SECRET) as client:
            assert client.post("/sleep?level=3").status_code == 400
            assert client.post("/sleep?mode=no").status_code == 400
            assert client.post("/wake_up?tags=soul").status_code == 400
        with server.http() as client:
            assert client.post("/sleep").status_code == 401


def test_open_requests_fail_or_go_on(directory: Path) -> None:
    long = BODY | {"max_tokens": 200, "stream": True}
    with served(with_workers([options(directory)]), admin_keys=ADMIN) as server, server.http() as client:
        whole = post(server, "/v1/completions", BODY | {"max_tokens": 200}).json()["choices"][0]["text"]
        with client.stream("POST", "/v1/completions", json=long) as stream:
            lines = stream.iter_lines()
            first = next(lines)
            call(server, "/sleep", mode="keep")
            call(server, "/wake_up")
            text = "".join(content(line) for line in (first, *lines))
        assert text == whole
        with client.stream("POST", "/v1/completions", json=long) as stream:
            lines = stream.iter_lines()
            next(lines)
            call(server, "/sleep", mode="abort")
            rest = list(lines)
        assert any('"finish_reason": "length"' in line or "put to sleep" in line for line in rest)
        call(server, "/wake_up")


def content(line: str) -> str:
    if not line.startswith("data: {"):
        return ""
    return "".join(choice["text"] for choice in json.loads(line.removeprefix("data: "))["choices"])


def test_files_of_weights_are_held(directory: Path) -> None:
    files = list(held(directory))
    assert sum(len(one) for one in files) == sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    for one in files:
        one.close()
