"""Command-R, Command-R+ of 2024: Action: ```json [{"tool_name": ..., "parameters": {...}}, ...]```.

moesaic serve DIR --parser command_r
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from moesaic.serve.parsers import Body, Parser, Tools
from moesaic.serve.parsers._json_calls import JsonBody, JsonStyle

OPENINGS = ("Action:", "```json")
CLOSINGS = ("```",)
STYLE = JsonStyle(OPENINGS, CLOSINGS)


@dataclass(frozen=True)
class CommandR(Parser):
    openings: ClassVar[tuple[str, ...]] = OPENINGS[:1]
    inner: ClassVar[tuple[str, ...]] = CLOSINGS

    def body(self, tools: Tools, opening: str) -> Body:
        return JsonBody(STYLE, tools)
