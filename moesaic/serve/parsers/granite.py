"""Granite 3: <|tool_call|>[{"name": ..., "arguments": {...}}, ...], or in <tool_call>; <response> around content.

moesaic serve DIR --parser granite
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from moesaic.serve.parsers import Body, Parser, Tools
from moesaic.serve.parsers._json_calls import JsonBody, JsonStyle

OPENINGS = ("<|tool_call|>", "<tool_call>")
CLOSINGS = ("</tool_call>", "<|/tool_call|>")
STYLE = JsonStyle(OPENINGS, CLOSINGS)


@dataclass(frozen=True)
class Granite(Parser):
    openings: ClassVar[tuple[str, ...]] = OPENINGS
    inner: ClassVar[tuple[str, ...]] = CLOSINGS
    silent: ClassVar[tuple[str, ...]] = ("<response>", "</response>")
    own_thinks: ClassVar[tuple[tuple[str, str], ...]] = (("Here is my thought process:", "Here is my response:"),)

    def body(self, tools: Tools, opening: str) -> Body:
        return JsonBody(STYLE, tools)
