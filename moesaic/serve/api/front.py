"""The outermost layer: what every HTTP request and response has, whatever the route.

A request gets an id. On a server without keys that listens on this machine only, the name it was sent to is checked: a
page of the web can make its own name mean 127.0.0.1 (DNS rebinding), and then its scripts would be let in. A response
says that no page may frame it, that its type is to be believed, and that nobody is told where a reader came from.
"""

from __future__ import annotations

import ipaddress
import logging
import time
from collections.abc import Iterable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moesaic.serve.api.errors import ApiError
from moesaic.serve.api.request_id import HEADER, REQUEST_ID, request_id

SAFETY = [
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
]
POLICY = (b"content-security-policy", b"frame-ancestors 'none'")

requests_log = logging.getLogger("moesaic.requests")


class Front:
    """`hosts`: the names this server is known by; None: any. With `log` every request is a line of the log."""

    def __init__(self, app: ASGIApp, hosts: frozenset[str] | None = None, log: bool = False) -> None:
        self.app = app
        self.hosts = hosts
        self.log = log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        name = request_id(headers.get(HEADER))
        REQUEST_ID.set(name)
        began, status = time.monotonic(), 0
        own = [(HEADER, name.encode()), *SAFETY]
        if scope["path"].startswith("/v1/messages"):
            own.append((b"request-id", name.encode()))  # what Anthropic's clients look for

        async def send_marked(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                theirs = list(message.get("headers", ()))
                names = {key.lower() for key, _ in theirs}
                added = [pair for pair in (*own, POLICY) if pair[0] not in names]
                message = {**message, "headers": [*theirs, *added]}
            await send(message)

        try:
            if not known_host(headers.get(b"host"), self.hosts):
                await refused(scope["path"])(scope, receive, send_marked)
            else:
                await self.app(scope, receive, send_marked)
        finally:
            if self.log:
                key = scope.get("state", {}).get("key_name", "-")
                seconds = time.monotonic() - began
                line = (name, key, scope["method"], scope["path"], status, seconds)
                requests_log.info("%s %s %s %r %d %.3f s", *line)


def print_requests() -> None:
    """Every request as a line on standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    requests_log.addHandler(handler)
    requests_log.setLevel(logging.INFO)
    requests_log.propagate = False


def known_host(header: bytes | None, hosts: frozenset[str] | None) -> bool:
    """Numbers are no names: nobody's page can be at an address of this machine. Browsers always send a host."""
    if hosts is None or header is None:
        return True
    name = header.decode("latin-1").strip().lower()
    name = name[1 : name.find("]")] if name.startswith("[") else name.partition(":")[0]
    name = name.rstrip(".")
    if name in hosts or name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def refused(path: str) -> ASGIApp:
    message = (
        "this server has no keys and does not know this host name. Start it with --allowed-host NAME, or with keys"
    )
    return ApiError(403, message, code="host_not_allowed").response(path)


def hosts_to_check(bound: str, keys: bool, allowed: Iterable[str]) -> frozenset[str] | None:
    """The names of a server by the address it is bound to. One that needs a key, or that others can reach anyway, takes
    any name, unless it was told which."""
    names = frozenset(name.lower().rstrip(".") for name in allowed)
    try:
        here = ipaddress.ip_address(bound).is_loopback
    except ValueError:
        here = False
    return names if names or (here and not keys) else None
