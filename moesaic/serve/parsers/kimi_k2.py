"""Kimi K2: <|tool_call_begin|>functions.NAME:NUMBER<|tool_call_argument_begin|>{...}<|tool_call_end|>, in a section.

moesaic serve DIR --parser kimi_k2
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from moesaic.serve.core.grammars.lark import Rules
from moesaic.serve.parsers import Body, Parser, Tools
from moesaic.serve.parsers._grammar import each_call
from moesaic.serve.parsers._headed import HeadedBody, HeadedStyle

CALLS, END_CALLS = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, ARGUMENTS, CLOSING = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
HEAD = re.compile(
    r"\s{0,8}(?P<id>(?:functions\.)?(?P<name>[\w./@-]{1,256}):\d{1,6})\s{0,8}"
    rf"{re.escape(ARGUMENTS)}\s{{0,8}}(?=\{{)"
)
# The model writes the section's tags without the s too.
ONE, END_ONE = "<|tool_call_section_begin|>", "<|tool_call_section_end|>"
STYLE = HeadedStyle(CALL, HEAD, (CLOSING,), sections=(CALLS, ONE), ends=(END_CALLS, END_ONE))
ID = re.compile(r"functions\.[\w./@-]+:\d+")


@dataclass(frozen=True)
class KimiK2(Parser):
    """A call's id is its tool's name and how many calls of the conversation came before."""

    openings: ClassVar[tuple[str, ...]] = (CALLS, ONE, CALL)
    inner: ClassVar[tuple[str, ...]] = (END_CALLS, END_ONE, ARGUMENTS, CLOSING)
    anywhere: ClassVar[bool] = True

    def body(self, tools: Tools, opening: str) -> Body:
        return HeadedBody(STYLE, tools)

    def call_rules(self, rules: Rules, tools: Tools) -> dict[str, str] | None:
        def write(name: str, schema: str) -> str:
            head = f"{rules.literal(f'{CALL}functions.{name}:')} {rules.rule('/[0-9]{1,3}/')}"
            return f"{head} {rules.literal(ARGUMENTS)} {schema} {rules.literal(CLOSING)}"

        return {CALLS: f"({each_call(rules, tools, write)})+ {rules.literal(END_CALLS)}"}

    def call_id(self, name: str, number: int) -> str | None:
        return f"functions.{name}:{number}"

    def with_ids(self, messages: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
        """The template writes ids as the model's own words, so those of other servers get the model's form."""
        count = 0
        renamed: dict[Any, str] = {}
        changed = []
        for message in messages:
            calls = []
            for call in message.get("tool_calls", ()):
                given = call.get("id")
                if not isinstance(given, str) or not ID.fullmatch(given):
                    renamed[given] = f"functions.{call['function']['name']}:{count}"
                    call = call | {"id": renamed[given]}
                calls.append(call)
                count += 1
            answered = message.get("tool_call_id")
            result = {"tool_call_id": renamed[answered]} if answered in renamed else {}
            changed.append(message | ({"tool_calls": calls} if calls else {}) | result)
        return changed
