"""Mistral: [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]; since 2025, [TOOL_CALLS]NAME[ARGS]{...} for each call.

moesaic serve DIR --parser mistral
"""

from __future__ import annotations

import hashlib
import re
import secrets
import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from moesaic.serve.core.grammars.lark import Rules
from moesaic.serve.parsers import Body, Parser, Tools
from moesaic.serve.parsers._either import EitherBody
from moesaic.serve.parsers._grammar import each_call, json_call
from moesaic.serve.parsers._headed import HeadedBody, HeadedStyle
from moesaic.serve.parsers._json_calls import JsonBody, JsonStyle

OPENING = "[TOOL_CALLS]"
HEAD = re.compile(
    r"\s{0,8}(?P<name>[\w.:/@-]{1,256})\s{0,8}(?:\[CALL_ID\](?P<id>[a-zA-Z0-9]{9}))?(?:\[ARGS\])?\s{0,8}(?=\{)"
)
NAMED = HeadedStyle(OPENING, HEAD)
LISTED = JsonStyle((OPENING,))
ALPHABET = string.ascii_letters + string.digits
ID = re.compile(r"[a-zA-Z0-9]{9}")


@dataclass(frozen=True)
class Mistral(Parser):
    """The templates take ids of nine letters or digits and no others."""

    openings: ClassVar[tuple[str, ...]] = (OPENING,)
    inner: ClassVar[tuple[str, ...]] = ("[ARGS]", "[CALL_ID]")
    own_thinks: ClassVar[tuple[tuple[str, str], ...]] = (("[THINK]", "[/THINK]"),)
    anywhere: ClassVar[bool] = True

    def body(self, tools: Tools, opening: str) -> Body:
        def choose(text: str) -> Body | None:
            found = text[len(OPENING) :].lstrip()
            if not found:
                return None
            return JsonBody(LISTED, tools) if found[0] in "[{" else HeadedBody(NAMED, tools)

        return EitherBody(choose)

    def call_rules(self, rules: Rules, tools: Tools) -> dict[str, str] | None:
        listed = json_call(rules, tools)
        named = each_call(rules, tools, lambda name, schema: f"{rules.literal(name + '[ARGS]')} {schema}")
        return {OPENING: f'("[" {listed} (", " {listed})* "]" | {named})'}

    def call_id(self, name: str, number: int) -> str | None:
        return "".join(secrets.choice(ALPHABET) for _ in range(9))

    def with_ids(self, messages: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
        """Ids of other servers become nine characters that depend on them alone: calls and results still match."""

        def own(given: Any) -> Any:
            if not isinstance(given, str) or ID.fullmatch(given):
                return given
            digest = int.from_bytes(hashlib.sha256(given.encode("utf-8", "replace")).digest())
            return "".join(ALPHABET[digest // len(ALPHABET) ** place % len(ALPHABET)] for place in range(9))

        changed = []
        for message in messages:
            calls = [call | {"id": own(call.get("id"))} for call in message.get("tool_calls", ())]
            result = {"tool_call_id": own(message["tool_call_id"])} if "tool_call_id" in message else {}
            changed.append(message | ({"tool_calls": calls} if calls else {}) | result)
        return changed
