"""How much a client may send, and how slowly: a body is read whole, within a size and a time, before anything else."""

from __future__ import annotations

import asyncio
import contextlib

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moesaic.serve.api.errors import ApiError
from moesaic.serve.api.strict_json import check_json


class Incoming:
    """What a client sends, and whether it has sent all, or gone."""

    def __init__(self, receive: Receive) -> None:
        self.receive = receive
        self.ended = False

    async def __call__(self) -> Message:
        message = await self.receive()
        self.ended = not message.get("more_body", False)
        return message


class BodyLimits:
    def __init__(self, app: ASGIApp, most: int, seconds: float) -> None:
        self.app = app
        self.most = most
        self.seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        incoming = Incoming(receive)
        try:
            body = await self._read(scope, incoming)
            if body and b"json" in dict(scope["headers"]).get(b"content-type", b"").lower():
                check_json(body)
        except ApiError as error:
            if error.status != 400:
                error.headers["connection"] = "close"
            await error.response()(scope, receive, send if error.status != 413 else self._heard(incoming, send))
            return
        if body is None:
            return
        first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return first.pop() if first else await receive()

        await self.app(scope, replay, send)

    def _heard(self, incoming: Incoming, send: Send) -> Send:
        """A way to answer that takes, and forgets, what is still coming before it hangs up: most clients read no answer
        until they have sent everything, and never see one on a connection that was closed before."""

        async def answer(message: Message) -> None:
            await send({**message, "more_body": True} if message["type"] == "http.response.body" else message)
            if message["type"] == "http.response.body":
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self.seconds):
                        while not incoming.ended:
                            await incoming()
                await send({"type": "http.response.body", "body": b""})

        return answer

    async def _read(self, scope: Scope, incoming: Incoming) -> bytes | None:
        """None if the client went away."""
        length = dict(scope["headers"]).get(b"content-length", b"0")
        self._check(int(length) if length.isdigit() else 0)
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self.seconds):
                while not incoming.ended:
                    message = await incoming()
                    if message["type"] == "http.disconnect":
                        return None
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    self._check(size)
        except TimeoutError:
            raise ApiError(408, f"the body took longer than {self.seconds:g} s", code="timeout") from None
        return b"".join(parts)

    def _check(self, size: int) -> None:
        if size > self.most:
            raise ApiError(413, f"the body is larger than {self.most} bytes", code="body_too_large")
