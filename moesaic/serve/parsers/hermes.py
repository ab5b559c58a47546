"""Hermes and Qwen2.5: <tool_call>{"name": ..., "arguments": {...}}</tool_call>.

moesaic serve DIR --parser hermes
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from moesaic.serve.core.grammars.lark import Rules
from moesaic.serve.parsers import Body, Parser, Tools
from moesaic.serve.parsers._grammar import BREAK, json_call
from moesaic.serve.parsers._json_calls import JsonBody, JsonStyle

OPENING, CLOSING = "<tool_call>", "</tool_call>"
STYLE = JsonStyle((OPENING,), (CLOSING,), one=True)


@dataclass(frozen=True)
class Hermes(Parser):
    openings: ClassVar[tuple[str, ...]] = (OPENING,)
    inner: ClassVar[tuple[str, ...]] = (CLOSING,)

    def body(self, tools: Tools, opening: str) -> Body:
        return JsonBody(STYLE, tools)

    def call_rules(self, rules: Rules, tools: Tools) -> dict[str, str] | None:
        line = rules.rule(BREAK)
        return {OPENING: f"{line} {json_call(rules, tools)} {line} {rules.literal(CLOSING)}"}
