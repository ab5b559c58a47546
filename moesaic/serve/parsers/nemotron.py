"""Nemotron Nano v2: <TOOLCALL>[{"name": ..., "arguments": {...}}, ...]</TOOLCALL>.

moesaic serve DIR --parser nemotron
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from moesaic.serve.parsers import Body, Parser, Tools
from moesaic.serve.parsers._json_calls import JsonBody, JsonStyle

OPENINGS = ("<TOOLCALL>",)
CLOSINGS = ("</TOOLCALL>",)
STYLE = JsonStyle(OPENINGS, CLOSINGS)


@dataclass(frozen=True)
class Nemotron(Parser):
    openings: ClassVar[tuple[str, ...]] = OPENINGS
    inner: ClassVar[tuple[str, ...]] = CLOSINGS

    def body(self, tools: Tools, opening: str) -> Body:
        return JsonBody(STYLE, tools)
