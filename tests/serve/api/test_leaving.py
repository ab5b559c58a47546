"""Clients that go away, requests that take too long, servers that are told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx
import openai
import pytest

from moesaic.model.tokenizer import Tokenizer
from moesaic.serve.core.engine import Engine
from tests.serve.api.running import NAME, Running, running
from tests.waiting import PATIENCE

LONG = {
    "messages": [{"role": "user", "content": "yes " * 60}],
    "max_tokens": 400,
    "ignore_eos": True,
    "temperature": 0.0,
}


HELD = 40  # tokens, after which the engine waits until it is clear what becomes of its clients


@pytest.fixture
def slow(new_engine: Callable[..., Engine]) -> Iterator[Running]:
    with running(new_engine(), hold=HELD) as server:
        yield server


def generated(server: Running) -> int:
    return server.engine.counts.generated_tokens


def nobody_is_left(server: Running, tokens: int = HELD + 3) -> None:
    """All clients are known to be gone while the engine is still at their requests, which ends those."""
    server.until(lambda: server.service.loop.open == 0)
    server.hold.release()
    server.until(lambda: server.idle)
    assert generated(server) <= tokens


def raw(server: Running) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=PATIENCE)


@pytest.mark.parametrize("wishes", [{}, {"n": 3}])
def test_a_stream_that_is_left_ends(slow: Running, wishes: dict[str, Any]) -> None:
    with slow.http() as client:
        with client.stream("POST", "/v1/chat/completions", json=LONG | wishes | {"stream": True}) as answer:
            lines = answer.iter_lines()
            for _ in range(9):
                next(lines)
            assert slow.engine.page_pool.in_use > 0
    nobody_is_left(slow)
    stats = slow.service.loop.stats()
    assert (stats.running, stats.waiting) == (0, 0)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_an_answer_nobody_waits_for_any_more_ends(slow: Running, path: str) -> None:
    field = {"/v1/completions": "prompt", "/v1/responses": "input"}.get(path, "user")
    body = json.dumps(LONG | {field: "yes"}).encode()
    with raw(slow) as leaving:
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        leaving.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        slow.until(lambda: generated(slow) > 0)
    nobody_is_left(slow)


def test_the_clients_own_way_of_leaving(slow: Running) -> None:
    messages: list[Any] = LONG["messages"]  # type: ignore[assignment]
    stream = slow.client().chat.completions.create(
        model=NAME, messages=messages, max_tokens=400, stream=True, extra_body={"ignore_eos": True}
    )
    for number, _ in enumerate(stream):
        if number == 3:
            stream.close()
            break
    nobody_is_left(slow)


def test_one_that_waits_is_forgotten_too(new_engine: Callable[..., Engine]) -> None:
    """A request that never got a page: its place in the queue is free at once."""
    with running(new_engine(max_requests=1), hold=5) as server:

        async def crowd() -> None:
            async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE) as client:
                first = asyncio.create_task(client.post("/v1/chat/completions", json=LONG | {"max_tokens": 60}))
                while not server.service.loop.open:
                    await asyncio.sleep(0.005)
                others = [asyncio.create_task(client.post("/v1/chat/completions", json=LONG)) for _ in range(5)]
                while server.service.loop.open < 6:
                    await asyncio.sleep(0.005)
                assert server.service.loop.stats().running <= 1
                for task in others:
                    task.cancel()
                await asyncio.gather(*others, return_exceptions=True)
                while server.service.loop.open > 1:
                    await asyncio.sleep(0.005)
                server.hold.release()
                assert (await first).json()["usage"]["completion_tokens"] == 60

        asyncio.run(crowd())
        server.until(lambda: server.idle)
        with server.http() as client:
            told = client.get("/metrics").text
        for reason, count in {"length": 1, "abort": 5, "stop": 0}.items():
            labels = f'{{finished_reason="{reason}",model_name="{NAME}"}}'
            assert f"moesaic:request_success_total{labels} {count}.0" in told
        assert generated(server) == 60


def test_a_body_that_never_ends_is_cut_off(new_engine: Callable[..., Engine]) -> None:
    with running(new_engine(), body_seconds=0.3) as server:
        with raw(server) as slow:
            head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            slow.sendall(head + b'Content-Length: 1000\r\n\r\n{"messages"')
            answer = b""
            while piece := slow.recv(4096):
                answer += piece
        assert answer.startswith(b"HTTP/1.1 408")
        assert b'"timeout_error"' in answer


def test_a_body_left_half_sent_leaves_nothing(server: Running) -> None:
    for _ in range(5):
        with raw(server) as half:
            half.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{")
    server.until(lambda: not server.tasks())
    assert server.post("/tokenize", {"prompt": "yes"}).status_code == 200


def test_large_bodies_are_refused_unread(new_engine: Callable[..., Engine]) -> None:
    with running(new_engine(), max_body=10_000) as server:
        said = server.post("/v1/chat/completions", LONG | {"user": "x" * 20_000})
        assert said.status_code == 413
        assert said.json()["error"]["code"] == "body_too_large"

        def pieces() -> Iterator[bytes]:
            for _ in range(100):
                yield b"x" * 1000

        with server.http() as client:  # its length is not told beforehand
            assert client.post("/v1/chat/completions", content=pieces()).status_code == 413
        assert server.post("/v1/chat/completions", LONG | {"max_tokens": 1}).status_code == 200


def test_clients_that_send_everything_first_hear_that_it_is_too_much(new_engine: Callable[..., Engine]) -> None:
    async def ask(server: Running) -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE, verify=False) as client:
            for size in (11_000, 3_000_000):
                assert (await client.post("/v1/completions", json={"prompt": "x" * size})).status_code == 413

            async def pieces() -> AsyncIterator[bytes]:
                for _ in range(1000):
                    yield b"x" * 1000

            assert (await client.post("/v1/completions", content=pieces())).status_code == 413
        plain = openai.DefaultAsyncHttpxClient(verify=False)
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", http_client=plain) as client:
            with pytest.raises(openai.APIStatusError) as refused:
                await client.completions.create(model=NAME, prompt="x" * 3_000_000)
            assert refused.value.status_code == 413

    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with running(new_engine(), max_body=10_000, body_seconds=3 * PATIENCE) as server:
        asyncio.run(ask(server))
        with raw(server) as whole:  # nothing is still coming, so nothing is waited for
            whole.sendall(head + b"Transfer-Encoding: chunked\r\n\r\n2ee0\r\n" + b"x" * 12_000 + b"\r\n0\r\n\r\n")
            answer = b""
            while piece := whole.recv(4096):
                answer += piece
            assert answer.startswith(b"HTTP/1.1 413")
    with running(new_engine(), max_body=10_000, body_seconds=0.3) as server, raw(server) as endless:
        endless.sendall(head + b"Content-Length: 20000\r\n\r\nx")
        while endless.recv(4096):  # it is not waited for longer than for any other
            pass


def test_a_long_prompt_is_refused(new_engine: Callable[..., Engine]) -> None:
    with running(new_engine(), max_prompt=20) as server:
        answer = server.post("/v1/completions", {"prompt": [5] * 21, "max_tokens": 1})
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "context_length_exceeded"
        assert server.post("/v1/completions", {"prompt": [5] * 20, "max_tokens": 1}).status_code == 200


def test_a_prompt_far_too_long_is_refused_by_its_size(
    new_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    encode = Tokenizer.encode

    def watched(self: Tokenizer, text: str, **options: Any) -> list[int]:
        read.append(len(text))
        return encode(self, text, **options)

    monkeypatch.setattr(Tokenizer, "encode", watched)
    text = "yes or no " * 100_000
    with running(new_engine()) as server:
        for path, body in (
            ("/v1/completions", {"prompt": text}),
            ("/v1/completions", {"prompt": ["yes", text]}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
            ("/v1/responses", {"input": text}),
            ("/v1/completions", {"prompt": text, "echo": True, "max_tokens": 0, "logprobs": 1}),
            ("/v1/embeddings", {"input": text}),
            ("/tokenize", {"prompt": text}),
            ("/tokenize", {"prompt": [text[:40_000], text[:40_000]]}),
            ("/tokenize", {"content": text}),
            ("/tokenize", {"messages": [{"role": "user", "content": text}]}),
            ("/detokenize", {"tokens": [5] * 100_000}),
        ):
            answer = server.post(path, body)
            assert answer.status_code == 413
            error = answer.json()["error"]
            assert error["code"] == "context_length_exceeded"
            assert "this server takes 65536 (its prompts have 512 tokens)" in error["message"]
        assert max(read, default=0) < 100  # of the second of two prompts, the first
        # One that is somewhat too long is read whole, and told exactly.
        answer = server.post("/v1/completions", {"prompt": "yes or no " * 500})
        assert "has 1502 tokens, and the model holds 512" in answer.json()["error"]["message"]
        assert answer.json()["error"]["code"] == "context_length_exceeded"
        assert (
            server.post("/tokenize", {"prompt": text[:60_000]}).json()["count"] > 10_000
        )  # counting is what it is for


def test_a_request_that_takes_too_long_ends(new_engine: Callable[..., Engine]) -> None:
    with running(new_engine(), hold=HELD, request_seconds=0.3) as server:
        answer = server.post("/v1/chat/completions", LONG)
        assert answer.status_code == 408
        assert answer.json()["error"]["type"] == "timeout_error"
        streamed = server.post("/v1/chat/completions", LONG | {"stream": True})
        assert streamed.status_code == 200
        assert '"timeout_error"' in streamed.text
        nobody_is_left(server)


def test_a_full_queue_says_when_to_come_back(new_engine: Callable[..., Engine]) -> None:
    with running(new_engine(max_requests=2), hold=HELD, max_queue=1) as server:
        stop = threading.Event()

        def hold() -> None:
            with server.http() as client:
                with client.stream("POST", "/v1/chat/completions", json=LONG | {"stream": True, "n": 3}) as answer:
                    for _ in answer.iter_lines():
                        if stop.is_set():
                            return

        holder = threading.Thread(target=hold)
        holder.start()
        server.until(lambda: server.service.loop.open == 3)
        try:
            for body in (LONG, LONG | {"stream": True}):
                answer = server.post("/v1/chat/completions", body)
                assert answer.status_code == 429
                assert int(answer.headers["retry-after"]) >= 1
                assert answer.json()["error"]["type"] == "rate_limit_error"
            with pytest.raises(openai.RateLimitError):
                server.client().embeddings.create(model=NAME, input="yes")
        finally:
            stop.set()
            server.hold.release()
            holder.join(PATIENCE)
        server.until(lambda: server.idle)
        assert server.post("/v1/chat/completions", LONG | {"max_tokens": 1}).status_code == 200
        assert server.post("/v1/chat/completions", LONG | {"n": 4}).status_code == 400


def test_a_head_that_never_ends_is_cut_off(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"

    def rest(one: socket.socket) -> bytes:
        with contextlib.suppress(ConnectionResetError):  # it was cut off before it had sent its half
            return one.recv(4096)
        return b""

    with raw(server) as second:
        second.sendall(whole)
        assert b"200 OK" in second.recv(4096)
        monkeypatch.setattr("moesaic.serve.api.middleware.HeaderTimeout.header_seconds", 0.2)
        with raw(server) as silent, raw(server) as half:
            half.sendall(whole[:20])
            second.sendall(whole[:20])
            assert [rest(one) for one in (silent, half)] == [b"", b""]
            while rest(second):
                pass


def test_the_client_is_the_first_to_drop_a_silent_connection(server: Running) -> None:
    expiry = httpx.Limits().keepalive_expiry
    assert expiry is not None and server.server.config.timeout_keep_alive > expiry


def test_a_client_that_does_not_read_is_left(
    new_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moesaic.serve.api.stream.EventStream.stall_seconds", 0.3)
    body = json.dumps(LONG | {"stream": True, "logprobs": True, "top_logprobs": 100, "n": 8}).encode()
    with running(new_engine(), hold=8 * 300) as server, raw(server) as deaf:
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        deaf.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        server.until(lambda: server.service.loop.open == 8)
        nobody_is_left(server, tokens=8 * 301)
