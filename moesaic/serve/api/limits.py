"""How much a client may send, and how slowly: a body is read whole, within a size and a time, before anything else."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moesaic.serve.api.errors import ApiError
from moesaic.serve.api.strict_json import check_json


class BodyLimits:
    def __init__(self, app: ASGIApp, most: int, seconds: float) -> None:
        self.app = app
        self.most = most
        self.seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            body = await self._read(scope, receive)
            if body and b"json" in dict(scope["headers"]).get(b"content-type", b""):
                check_json(body)
        except ApiError as error:
            if error.status != 400:
                error.headers["connection"] = "close"  # what is left of the body is not read
            await error.response()(scope, receive, send)
            return
        if body is None:
            return
        first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return first.pop() if first else await receive()

        await self.app(scope, replay, send)

    async def _read(self, scope: Scope, receive: Receive) -> bytes | None:
        """None if the client went away."""
        length = dict(scope["headers"]).get(b"content-length", b"0")
        self._check(int(length) if length.isdigit() else 0)
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self.seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    self._check(size)
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError:
            raise ApiError(408, f"the body took longer than {self.seconds:g} s", code="timeout") from None

    def _check(self, size: int) -> None:
        if size > self.most:
            raise ApiError(413, f"the body is larger than {self.most} bytes", code="body_too_large")
