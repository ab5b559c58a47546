"""Granite 20B function calling: <function_call> {"name": ..., "arguments": {...}}.

moesaic serve DIR --parser granite_20b
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from moesaic.serve.parsers import Body, Parser, Tools
from moesaic.serve.parsers._json_calls import JsonBody, JsonStyle

OPENINGS = ("<function_call>",)
CLOSINGS = ("</function_call>",)
STYLE = JsonStyle(OPENINGS, CLOSINGS)


@dataclass(frozen=True)
class Granite20b(Parser):
    openings: ClassVar[tuple[str, ...]] = OPENINGS
    inner: ClassVar[tuple[str, ...]] = CLOSINGS

    def body(self, tools: Tools, opening: str) -> Body:
        return JsonBody(STYLE, tools)
