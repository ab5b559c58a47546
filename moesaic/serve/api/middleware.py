"""What every HTTP request passes before its route: the timeout of its header, the limits of its body, strict JSON, and
HEAD answered like GET. API keys, where the server has any, are checked before all of it (`keys.py`)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import sys
from typing import Any

import h11
from pydantic_core import from_json
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from moesaic.serve.api.errors import ApiError
from moesaic.serve.api.fields import RECEIVED, Received
from moesaic.serve.api.request_id import HEADER as REQUEST_ID_HEADER
from moesaic.serve.api.request_id import request_id

JSON_PATHS = ("/api/", "/completion", "/infill", "/embedding")
HEADER_SECONDS = 20.0
REFUSED_SECONDS = 2.0  # for what a client still sends after what was no HTTP
HUGE_EXPONENT = re.compile(rb"[eE]\+?[0-9]{3}")
ONLY_DIGITS = bytes(ord("0") if chr(byte).isdigit() and byte < 128 else 32 for byte in range(256))
WHOLE_FLOAT = re.compile(rb"[:\[,]\s*-?[0-9]+(\.0+([eE]\+?[0-9]+)?|(\.[0-9]+)?[eE]\+?[0-9]+)\s*[,\]}]")
HUGE_DIGITS = b"0" * 300  # of any value, after that


class HeaderTimeout(H11Protocol):
    """Closes connections on which the header of a request does not arrive in time: each would hold a file descriptor.
    Between two requests a connection may be silent, for as long as uvicorn's keep-alive timeout allows."""

    header_seconds = HEADER_SECONDS
    timer: asyncio.TimerHandle | None = None
    refused = False  # what still comes is read and dropped

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._set_timer()

    def data_received(self, data: bytes) -> None:
        if self.refused:
            return
        super().data_received(data)
        if not self.refused:
            self._set_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timer()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP, or too much of it, is answered in the form of all errors, as far as it can still be."""
        problem = sys.exception()
        status = problem.error_status_hint if isinstance(problem, h11.RemoteProtocolError) else 400
        error = ApiError(status, f"the request is not valid HTTP ({problem or msg})", code="invalid_http").response()
        name = request_id(None).encode()
        headers = [*error.raw_headers, (b"connection", b"close"), (REQUEST_ID_HEADER, name)]
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            cycle = self.cycle
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True  # its application shall not answer, too
                cycle.message_event.set()
            for event in (
                h11.Response(status_code=status, headers=headers),
                h11.Data(data=bytes(error.body)),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        # Were the connection closed with something unread, the client might never see the answer.
        self.refused = True
        self._cancel_timer()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.timer = self.loop.call_later(REFUSED_SECONDS, self.transport.close)

    def _set_timer(self) -> None:
        if self.conn.their_state is not h11.IDLE:
            self._cancel_timer()
        elif self.timer is None:
            self.timer = self.loop.call_later(self.header_seconds, self._close)

    def _cancel_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def _close(self) -> None:
        self.timer = None
        if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
            self.transport.close()


class Incoming:
    """The messages of a request, and whether the last one has come, or the client has gone."""

    def __init__(self, receive: Receive) -> None:
        self.receive = receive
        self.ended = False

    async def __call__(self) -> Message:
        message = await self.receive()
        self.ended = not message.get("more_body", False)
        return message


class Turns:
    """Lets no more than so many requests begin in one pass of the event loop. Reading one takes a millisecond; were the
    hundreds of a burst all read in one pass, streams would stand still for as long."""

    def __init__(self, together: int = 8) -> None:
        self.together = together
        self.begun = 0

    async def wait(self) -> None:
        while self.begun >= self.together:
            await asyncio.sleep(0)
        if not self.begun:
            asyncio.get_running_loop().call_soon(self._next_pass)
        self.begun += 1

    def _next_pass(self) -> None:
        self.begun = 0


class RequestLimits:
    """Reads the whole body, within a size and a time, before anything else sees the request. HEAD is answered like GET
    without the body, as proxies and health checks ask for it."""

    def __init__(self, app: ASGIApp, max_body: int, body_seconds: float) -> None:
        self.app = app
        self.max_body = max_body
        self.body_seconds = body_seconds
        self.turns = Turns()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        incoming = Incoming(receive)
        received = Received()
        try:
            body = await self._read(scope, incoming)
            if body:
                await self.turns.wait()
            if body:
                scope = json_anyway(scope)
            if body and b"json" in dict(scope["headers"]).get(b"content-type", b"").lower():
                received.content = check_json(body)
                if WHOLE_FLOAT.search(body):
                    received.content = whole_numbers(received.content)
                    body = json.dumps(received.content).encode()
        except ApiError as error:
            if error.status != 400:
                error.headers["connection"] = "close"
            respond = error.response(scope["path"])
            await respond(scope, receive, send if error.status != 413 else self._after_body(incoming, send))
            return
        if body is None:
            return
        first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return first.pop() if first else await receive()

        if scope["method"] == "HEAD":
            scope, send = {**scope, "method": "GET"}, without_body(send)
        RECEIVED.set(received)
        await self.app(scope, replay, naming_ignored(send, received))

    def _after_body(self, incoming: Incoming, send: Send) -> Send:
        """Drains what is still coming before the connection is closed: most clients read no response until they have
        sent everything, and never see one on a connection that was closed before."""

        async def respond(message: Message) -> None:
            await send({**message, "more_body": True} if message["type"] == "http.response.body" else message)
            if message["type"] == "http.response.body":
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self.body_seconds):
                        while not incoming.ended:
                            await incoming()
                await send({"type": "http.response.body", "body": b""})

        return respond

    async def _read(self, scope: Scope, incoming: Incoming) -> bytes | None:
        """None if the client disconnected."""
        length = dict(scope["headers"]).get(b"content-length", b"0")
        self._check_size(int(length) if length.isdigit() else 0)
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self.body_seconds):
                while not incoming.ended:
                    message = await incoming()
                    if message["type"] == "http.disconnect":
                        return None
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    self._check_size(size)
        except TimeoutError:
            raise ApiError(408, f"the body took longer than {self.body_seconds:g} s", code="timeout") from None
        return b"".join(parts)

    def _check_size(self, size: int) -> None:
        if size > self.max_body:
            raise ApiError(413, f"the body is larger than {self.max_body} bytes", code="body_too_large")


def json_anyway(scope: Scope) -> Scope:
    """A body on a path of Ollama's or llama.cpp's API is JSON, whatever its header says: their documentation asks with
    `curl -d` alone. Not so from a web page, which could otherwise ask without its browser asking us first."""
    headers = dict(scope["headers"])
    if not scope["path"].startswith(JSON_PATHS) or b"origin" in headers or b"sec-fetch-site" in headers:
        return scope
    return {**scope, "headers": [*(headers | {b"content-type": b"application/json"}).items()]}


def naming_ignored(send: Send, received: Received) -> Send:
    """The response's header names the fields of the request that nobody read."""

    async def send_named(message: Message) -> None:
        if message["type"] == "http.response.start" and received.ignored:
            message = {**message, "headers": [*message.get("headers", ()), *received.header()]}
        await send(message)

    return send_named


def check_json(body: bytes) -> Any:
    """JSON as its standard has it. Python's own reader also takes NaN, lone surrogates and numbers beyond all bounds,
    which would fail later, where nobody expects them."""
    try:
        content = from_json(body, allow_inf_nan=False)
        if HUGE_EXPONENT.search(body) or HUGE_DIGITS in body.translate(ONLY_DIGITS):
            json.dumps(content, allow_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON ({error})", code="invalid_json") from None
    return content


def whole_numbers(content: Any) -> Any:
    """A whole number may be written as 1.0 or 1e3: in JSON, and by JSON Schema, it is the same number."""
    if isinstance(content, float):
        return int(content) if content.is_integer() and abs(content) <= 2**53 else content
    if isinstance(content, dict):
        return {key: whole_numbers(value) for key, value in content.items()}
    return [whole_numbers(value) for value in content] if isinstance(content, list) else content


def without_body(send: Send) -> Send:
    async def send_header(message: Message) -> None:
        if message["type"] == "http.response.start":
            await send(message)
            await send({"type": "http.response.body", "body": b""})  # which ends streams, too

    return send_header
