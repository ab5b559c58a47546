"""API keys, compared in constant time, and kept and logged only as hashes; what each may use, if that is limited.

A line of a key file is a key; or a name, a key and its limits:

    sk-of-the-team
    alice sk-of-alice rpm=60 tpm=100000 concurrent=4

Metrics and logs know a key by its name, and one without a name by a few digits of its hash.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moesaic.errors import UserError
from moesaic.serve.api.errors import ApiError
from moesaic.serve.api.rate_limits import CALLER, KeyLimits, KeyUse

# Probes, which show nothing of anybody's requests. The web page needs no key either: it asks for one itself.
OPEN_PATHS = frozenset({"/health", "/ping", "/ready", "/version"})
VARIABLE = "MOESAIC_API_KEY"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
REMEDY = "Write a key a line, or `NAME KEY` and limits such as rpm=60 tpm=100000 concurrent=4."


@dataclass(frozen=True)
class KeyEntry:
    name: str
    limits: KeyLimits = field(default_factory=KeyLimits)


@dataclass(frozen=True)
class Keys:
    """No hashes: no key is needed. `entries` are by hash; a key without one has no name and no limits."""

    hashes: frozenset[bytes] = frozenset()
    entries: Mapping[bytes, KeyEntry] = field(default_factory=dict, compare=False)

    @classmethod
    def read(
        cls, file: Path | None, variable: str | None, flag: str = "--api-key-env", given: Sequence[str] = ()
    ) -> Keys:
        """From a file, an environment variable, words of the command line, or all of them."""
        entries: dict[bytes, KeyEntry] = {}
        if file is not None:
            try:
                text = file.read_text(encoding="utf-8-sig")
            except (OSError, UnicodeDecodeError) as error:
                reason = getattr(error, "strerror", None) or "not text"
                raise UserError(file, f"cannot be read ({reason})", "Give a file with one key a line.") from None
            entries |= _lines(text, file)
            if not entries:
                raise UserError(file, "holds no key", "Write one key a line.")
        if variable is not None:
            found = _lines(os.environ.get(variable, ""), variable)
            if not found:
                raise UserError(flag, f"the environment variable {variable} is not set, or empty")
            entries |= found
        for key in given:
            if len(key.split()) != 1:
                raise UserError("--api-key", "is empty, or more than one word", "Give a key, or --api-key-file.")
            entries |= _lines(key, "--api-key")
        names = [entry.name for entry in entries.values()]
        if twice := {name for name in names if names.count(name) > 1}:
            raise UserError(file or flag, f"two keys are called {min(twice)}", "Give each a name of its own.")
        return cls(frozenset(entries), entries)

    def find(self, key: str) -> bytes | None:
        """The hash of a known key. All are compared, each in constant time: the time reveals nothing about the keys."""
        given = _hash(key)
        known = [hmac.compare_digest(given, one) for one in self.hashes]
        return given if any(known) else None

    def owner(self, header: str) -> str | None:
        """Who sends this Authorization header, as a name that does not reveal the key; None: the key is unknown."""
        found = self.find(bearer(header))
        return None if found is None else cache_owner(found)

    def users(self) -> dict[bytes, KeyUse]:
        """The use of every key, by its hash."""
        return {
            one: KeyUse(entry.name, entry.limits)
            for one in self.hashes
            for entry in [self.entries.get(one) or KeyEntry(_nameless(one))]
        }


def key_variable() -> str | None:
    """The environment variable that holds a key where nobody named one."""
    return VARIABLE if os.environ.get(VARIABLE, "").strip() else None


def bearer(header: str) -> str:
    scheme, _, key = header.partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def cache_owner(key_hash: bytes) -> str:
    return hashlib.sha256(b"moesaic cache" + key_hash).hexdigest()


class KeyGuard:
    """Refuses requests without a known key, before their body is read, but for those to `open_paths`; and those of keys
    that are over their limits. For admins' paths the keys are others."""

    def __init__(
        self,
        app: ASGIApp,
        keys: Keys,
        open_paths: frozenset[str],
        admin_keys: Keys | None = None,
        admin_prefix: str = "",
        admin_paths: frozenset[str] = frozenset(),
        users: Mapping[bytes, KeyUse] | None = None,
    ) -> None:
        self.app = app
        self.keys = keys
        self.users = keys.users() if users is None else users
        self.open_paths = open_paths
        self.admin_keys = admin_keys or Keys()
        self.admin_prefix = admin_prefix
        self.admin_paths = admin_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self.open_paths or scope["method"] == "OPTIONS":
            await self.app(scope, receive, send)
            return
        path = scope["path"]
        admin = path in self.admin_paths or (bool(self.admin_prefix) and path.startswith(self.admin_prefix))
        keys = self.admin_keys if admin else self.keys
        found = self._known(keys, dict(scope["headers"]))
        if found is None and (admin or keys.hashes):
            await unauthorized(path)(scope, receive, send)
            return
        scope.setdefault("state", {})["owner"] = "" if found is None else cache_owner(found)
        user = None if admin or found is None else self.users[found]
        if user is None:
            await self.app(scope, receive, send)
        else:
            await self._limited(user, scope, receive, send)

    def _known(self, keys: Keys, headers: dict[bytes, bytes]) -> bytes | None:
        """As OpenAI's clients send a key, or as Anthropic's do."""
        found = keys.find(bearer(headers.get(b"authorization", b"").decode("latin-1")))
        return found or keys.find(headers.get(b"x-api-key", b"").decode("latin-1").strip())

    async def _limited(self, user: KeyUse, scope: Scope, receive: Receive, send: Send) -> None:
        """Only what may cost something is counted: a page that shows metrics shall not use up anybody's requests."""
        scope["state"]["key_name"] = user.name

        async def send_counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                user.statuses[message["status"]] += 1
                left = [(name.encode(), text.encode()) for name, text in user.headers().items()]
                message = {**message, "headers": [*message.get("headers", ()), *left]}
            await send(message)

        CALLER.set(user)
        if scope["method"] != "POST" or scope["path"].endswith("/cancel"):
            await self.app(scope, receive, send_counted)
            return
        try:
            user.begin()
        except ApiError as error:
            await error.response(scope["path"])(scope, receive, send_counted)
            return
        try:
            await self.app(scope, receive, send_counted)
        finally:
            user.end()


def unauthorized(path: str) -> ASGIApp:
    message = "no API key, or not one of this server's. Send it as `Authorization: Bearer KEY` (or as `x-api-key: KEY`)"
    headers = {"www-authenticate": "Bearer"}
    return ApiError(401, message, code="invalid_api_key", headers=headers).response(path)


def _lines(text: str, place: Path | str) -> dict[bytes, KeyEntry]:
    """No error shows a word of a line: each might be a key."""
    found: dict[bytes, KeyEntry] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or line.startswith("# "):
            continue
        plain = [word for word in words if not _is_limit(word)]
        if len(plain) not in (1, 2) or words[: len(plain)] != plain:
            raise UserError(place, f"line {number} is neither a key nor a name, a key and limits", REMEDY)
        key = _hash(plain[-1])
        if len(plain) == 2 and not NAME.fullmatch(plain[0]):
            raise UserError(place, f"the name in line {number} is no name", "Take letters, digits, dots and dashes.")
        limits = _limits(words[len(plain) :], f"{place}, line {number}")
        found[key] = KeyEntry(plain[0] if len(plain) == 2 else _nameless(key), limits)
    return found


def _is_limit(word: str) -> bool:
    return word.partition("=")[0] in {one.name for one in fields(KeyLimits)} and "=" in word


def _limits(words: Sequence[str], place: str) -> KeyLimits:
    found: dict[str, Any] = {}
    for word in words:
        name, _, number = word.partition("=")
        if not (number.isascii() and number.isdigit() and 0 < int(number) < 2**53):
            raise UserError(place, f"{name} must be a whole number above 0", REMEDY)
        found[name] = int(number)
    return KeyLimits(**found)


def _nameless(key: bytes) -> str:
    return f"key-{hashlib.sha256(b'moesaic name' + key).hexdigest()[:8]}"


def _hash(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
