"""A client of the API whose worker is killed in the middle of a stream sees what it would have seen."""

from __future__ import annotations

import json
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from moesaic.serve.cluster.launch import with_workers
from tests.serve.api.test_structure import QUESTION, WEATHER
from tests.serve.cluster.over_http import NAME, Served, served
from tests.serve.cluster.test_death import signal_to
from tests.serve.cluster.workers import Held, let, options

FREE: Any = {"extra_body": {"ignore_eos": True}}
ASKED: list[dict[str, Any]] = [
    {"temperature": 0.0, "max_tokens": 30, **FREE},
    {"seed": 11, "n": 3, "max_tokens": 30, "logprobs": True, "top_logprobs": 2, **FREE},
    {"seed": 1, "max_tokens": 120, "tools": [WEATHER], "tool_choice": "required"},
    {"seed": 2, "max_tokens": 60, "response_format": {"type": "json_object"}},
]
ENTRY = 4  # tokens that all have before the first death


def chat(client: openai.OpenAI, wishes: dict[str, Any], begun: threading.Event | None = None) -> dict[str, Any]:
    """A stream, joined."""
    said: dict[int, dict[str, Any]] = {}
    usage: Any = None
    usual: Any = {"model": NAME, "messages": QUESTION, "stream": True, "stream_options": {"include_usage": True}}
    for chunk in client.chat.completions.create(**usual | wishes):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            one = said.setdefault(choice.index, {"text": "", "calls": {}, "logprobs": [], "end": None})
            assert one["end"] is None
            one["text"] += choice.delta.content or ""
            for call in choice.delta.tool_calls or ():
                name, arguments = one["calls"].get(call.index, ("", ""))
                one["calls"][call.index] = (
                    name + (call.function.name or ""),
                    arguments + (call.function.arguments or ""),
                )
            if choice.logprobs:
                one["logprobs"] += [entry.model_dump() for entry in choice.logprobs.content]
            one["end"] = choice.finish_reason
        if begun is not None:
            begun.set()
    return {"said": said, "usage": usage.model_dump()}


def begun(server: Served, tokens: int) -> bool:
    entries = list(server.loop._requests.values())
    return len(entries) == 6 and all(entry.request.written >= tokens for entry in entries)


@pytest.mark.parametrize("count", [1, 2])
def test_streams_go_on_when_workers_are_killed(directory: Path, gate: Path, count: int) -> None:
    wanted = options(directory, policy=Held(gate=gate), reuse_prefixes=False)
    with served(with_workers([wanted] * count)) as server, ThreadPoolExecutor(len(ASKED)) as pool:
        client = server.client()
        undisturbed = [chat(client, wishes) for wishes in ASKED]
        called = undisturbed[2]["said"][0]["calls"][0]
        assert called[0] == "weather" and json.loads(called[1])["city"]
        let(gate, ENTRY)
        answers = [pool.submit(chat, client, wishes) for wishes in ASKED]
        for tokens in (ENTRY, ENTRY + 5):
            server.until(lambda tokens=tokens: begun(server, tokens))
            deaths = server.loop.deaths
            for worker in list(server.loop.workers):
                signal_to(worker, signal.SIGKILL)
            server.until(lambda deaths=deaths: server.loop.deaths == deaths + count)
            with server.http() as plain:
                assert plain.get("/health").status_code == 200
            let(gate, tokens + 5)
            server.until(lambda: all(worker.ready is not None for worker in server.loop.workers))
        let(gate, 1000)
        assert [answer.result() for answer in answers] == undisturbed
        with server.http() as plain:
            assert plain.get("/ready").status_code == 200
        assert server.loop.resumed >= 6


def test_it_is_not_ready_while_no_worker_is(directory: Path, gate: Path) -> None:
    with (
        served(with_workers([options(directory, policy=Held(gate=gate))])) as server,
        server.http() as client,
        ThreadPoolExecutor(1) as pool,
    ):
        assert client.get("/ready").status_code == client.get("/health").status_code == 200
        let(gate, 0)
        signal_to(server.loop.workers[0], signal.SIGKILL)
        server.until(lambda: server.loop.deaths == 1)
        refused = client.get("/ready")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_ready")
        assert client.get("/health").status_code == 200
        body = {"prompt": "the number", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        waiting = pool.submit(client.post, "/v1/completions", json=body)  # and is not refused
        let(gate, 100)
        assert waiting.result().json()["usage"]["completion_tokens"] == 4
        assert client.get("/ready").status_code == 200
