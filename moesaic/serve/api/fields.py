"""Which fields of a body were not used: refused by name where they would change the answer (`schema/not_offered.py`),
named in the response's header `x-moesaic-ignored` otherwise.

Every route that takes a body in one of our schemas is looked at, without a line in the route: `check_fields` stands in
front of a router's endpoints, and compares the body as it came with the schema it was read into.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from fastapi import APIRouter
from fastapi.routing import APIRoute
from pydantic import AliasChoices, AliasPath, BaseModel
from pydantic.fields import FieldInfo

from moesaic.serve.api.errors import ApiError
from moesaic.serve.api.schema.not_offered import NOT_OFFERED
from moesaic.serve.api.schema.sampling import RequestModel

HEADER = b"x-moesaic-ignored"
MOST_NAMES = 32  # in the header; a body may hold a million
MOST_CHARS = 64  # of a name


@dataclass
class Received:
    """The JSON of a request as it came, and which of its fields nobody reads."""

    content: Any = None
    ignored: list[str] = field(default_factory=list)

    def header(self) -> list[tuple[bytes, bytes]]:
        """Names are the client's: none may break out of a header."""
        names = [quote(name[:MOST_CHARS], safe="._-[]:/ ").strip() or "%20" for name in self.ignored[:MOST_NAMES]]
        more = [f"... {len(self.ignored) - MOST_NAMES} more"] if len(self.ignored) > MOST_NAMES else []
        return [(HEADER, ", ".join([*names, *more]).encode())] if names else []


def note_ignored(name: str) -> None:
    """A field, or a part of one, that is known and not used."""
    received = RECEIVED.get()
    if received is not None:
        received.ignored.append(name)


RECEIVED: ContextVar[Received | None] = ContextVar("RECEIVED", default=None)  # of the request that is being answered


def check_fields(router: APIRouter) -> APIRouter:
    """The same router, whose endpoints see only bodies all of whose fields may be used or ignored."""
    for route in router.routes:
        if isinstance(route, APIRoute) and inspect.iscoroutinefunction(route.endpoint):
            route.endpoint = route.dependant.call = _checked(route.endpoint)
    return router


def _checked(endpoint: Any) -> Any:
    @functools.wraps(endpoint)
    async def checked(*args: Any, **kwargs: Any) -> Any:
        received = RECEIVED.get()
        if received is not None:
            for value in kwargs.values():
                if isinstance(value, RequestModel):
                    note_unused(received, value)
        return await endpoint(*args, **kwargs)

    return checked


def note_unused(received: Received, body: RequestModel) -> None:
    for name, plain, value in unused(received.content, body):
        refused = NOT_OFFERED.get(plain)
        if refused is not None and refused.matters(value):
            raise ApiError(400, f"{name}: not supported; {refused.instead}", param=name, code="unsupported_parameter")
        received.ignored.append(name)


def unused(content: Any, read: Any, name: str = "", plain: str = "") -> Iterator[tuple[str, str, Any]]:
    """The fields of some JSON that the schema it was read into does not have: where (`messages.0.x`), the same without
    numbers (`messages.x`), and their values."""
    if isinstance(read, BaseModel) and isinstance(content, dict):
        if read.model_config.get("extra") == "allow":
            return
        known = {spelling: key for key, info in type(read).model_fields.items() for spelling in _spellings(key, info)}
        for key, value in content.items():
            where = f"{name}.{key}" if name else str(key)
            flat = f"{plain}.{key}" if plain else str(key)
            if key in known:
                yield from unused(value, getattr(read, known[key]), where, flat)
            else:
                yield where, flat, value
    elif isinstance(content, list) and isinstance(read, list) and len(content) == len(read):
        for number, (value, item) in enumerate(zip(content, read, strict=True)):
            if isinstance(value, dict):
                yield from unused(value, item, f"{name}.{number}", plain)


def _spellings(name: str, info: FieldInfo) -> Iterator[str]:
    """What a client may call a field."""
    match info.validation_alias or info.alias:
        case str(alias):
            yield alias
        case AliasChoices(choices=choices):
            yield from (str(choice.path[0]) if isinstance(choice, AliasPath) else choice for choice in choices)
        case AliasPath(path=path):
            yield str(path[0])
        case None:
            yield name
            return
    yield name
