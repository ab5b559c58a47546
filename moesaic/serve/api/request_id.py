"""The name of an HTTP request, in its response's header and in the log: the client's (`X-Request-Id`), or a new one."""

from __future__ import annotations

import re
import uuid
from contextvars import ContextVar

HEADER = b"x-request-id"
GIVEN = re.compile(rb"[\x21-\x7e]{1,128}")

REQUEST_ID: ContextVar[str] = ContextVar("REQUEST_ID", default="")


def request_id(given: bytes | None) -> str:
    return given.decode() if given is not None and GIVEN.fullmatch(given) else uuid.uuid4().hex
