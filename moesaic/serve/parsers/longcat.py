"""LongCat: <longcat_tool_call>{"name": ..., "arguments": {...}}</longcat_tool_call>.

moesaic serve DIR --parser longcat
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from moesaic.serve.parsers import Body, Parser, Tools
from moesaic.serve.parsers._json_calls import JsonBody, JsonStyle

OPENINGS = ("<longcat_tool_call>",)
CLOSINGS = ("</longcat_tool_call>",)
STYLE = JsonStyle(OPENINGS, CLOSINGS, one=True)


@dataclass(frozen=True)
class LongCat(Parser):
    openings: ClassVar[tuple[str, ...]] = OPENINGS
    inner: ClassVar[tuple[str, ...]] = CLOSINGS
    own_thinks: ClassVar[tuple[tuple[str, str], ...]] = (("<longcat_think>", "</longcat_think>"),)

    def body(self, tools: Tools, opening: str) -> Body:
        return JsonBody(STYLE, tools)
