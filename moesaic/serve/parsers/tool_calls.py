"""Jamba, Hunyuan-A13B: <tool_calls>[{"name": ..., "arguments": {...}}, ...]</tool_calls>; MiniMax-M1, one a line.

moesaic serve DIR --parser tool_calls
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from moesaic.serve.parsers import Body, Parser, Tools
from moesaic.serve.parsers._json_calls import JsonBody, JsonStyle

OPENINGS = ("<tool_calls>",)
CLOSINGS = ("</tool_calls>",)
STYLE = JsonStyle(OPENINGS, CLOSINGS)


@dataclass(frozen=True)
class ToolCalls(Parser):
    openings: ClassVar[tuple[str, ...]] = OPENINGS
    inner: ClassVar[tuple[str, ...]] = CLOSINGS

    def body(self, tools: Tools, opening: str) -> Body:
        return JsonBody(STYLE, tools)
