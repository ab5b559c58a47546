"""API keys, compared in constant time, and kept and logged only as hashes."""

from __future__ import annotations

import hashlib
import hmac
import os
from dataclasses import dataclass
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from moesaic.errors import UserError
from moesaic.serve.api.errors import ApiError

# Probes, which show nothing of anybody's requests. The web page needs no key either: it asks for one itself.
OPEN_PATHS = frozenset({"/health", "/ready", "/version"})


@dataclass(frozen=True)
class Keys:
    """No hashes: no key is needed."""

    hashes: frozenset[bytes] = frozenset()

    @classmethod
    def read(cls, file: Path | None, variable: str | None, flag: str = "--api-key-env") -> Keys:
        """One key a line, from a file, an environment variable or both."""
        keys: list[str] = []
        if file is not None:
            try:
                text = file.read_text(encoding="utf-8-sig")
            except (OSError, UnicodeDecodeError) as error:
                reason = getattr(error, "strerror", None) or "not text"
                raise UserError(file, f"cannot be read ({reason})", "Give a file with one key a line.") from None
            keys += _lines(text, file)
            if not keys:
                raise UserError(file, "holds no key", "Write one key a line.")
        if variable is not None:
            found = _lines(os.environ.get(variable, ""), variable)
            if not found:
                raise UserError(flag, f"the environment variable {variable} is not set, or empty")
            keys += found
        return cls(frozenset(_hash(key) for key in keys))

    def owner(self, header: str) -> str | None:
        """Who sends this Authorization header, as a name that does not reveal the key; None: the key is unknown."""
        scheme, _, key = header.partition(" ")
        given = _hash(key.strip()) if scheme.lower() == "bearer" else b""
        # All are compared, each in constant time: the time it takes reveals nothing about the keys.
        known = [hmac.compare_digest(given, one) for one in self.hashes]
        return hashlib.sha256(b"moesaic cache" + given).hexdigest() if any(known) else None


class KeyGuard:
    """Refuses requests without a known key, before their body is read, but for those to `open_paths`. Below
    `admin_prefix` the keys are others."""

    def __init__(
        self,
        app: ASGIApp,
        keys: Keys,
        open_paths: frozenset[str],
        admin_keys: Keys | None = None,
        admin_prefix: str = "",
    ) -> None:
        self.app = app
        self.keys = keys
        self.open_paths = open_paths
        self.admin_keys = admin_keys or Keys()
        self.admin_prefix = admin_prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in self.open_paths and scope["method"] != "OPTIONS":
            headers = dict(scope["headers"])
            admin = bool(self.admin_prefix) and scope["path"].startswith(self.admin_prefix)
            keys = self.admin_keys if admin else self.keys
            owner = keys.owner(headers.get(b"authorization", b"").decode("latin-1"))
            if owner is None and not admin:  # as Anthropic's clients send it
                owner = keys.owner("Bearer " + headers.get(b"x-api-key", b"").decode("latin-1"))
            if owner is None and not admin and not keys.hashes:
                owner = ""  # clients need no key
            if owner is None:
                await unauthorized(scope["path"])(scope, receive, send)
                return
            scope.setdefault("state", {})["owner"] = owner
        await self.app(scope, receive, send)


def unauthorized(path: str) -> ASGIApp:
    message = "no API key, or not one of this server's. Send it as `Authorization: Bearer KEY` (or as `x-api-key: KEY`)"
    headers = {"www-authenticate": "Bearer"}
    return ApiError(401, message, code="invalid_api_key", headers=headers).response(path)


def _lines(text: str, place: Path | str) -> list[str]:
    """One key a line. Of a comment, or of a name beside a key, every word would be a key."""
    for number, line in enumerate(text.splitlines(), 1):
        if len(line.split()) > 1:
            raise UserError(place, f"line {number} is more than one word", "Write one key a line, and nothing else.")
    return text.split()


def _hash(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
