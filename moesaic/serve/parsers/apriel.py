"""Apriel: reasoning up to [BEGIN FINAL RESPONSE]; <tool_calls>[{"name": ..., "arguments": {...}}, ...]</tool_calls>.

moesaic serve DIR --parser apriel
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
class Apriel(Parser):
    openings: ClassVar[tuple[str, ...]] = OPENINGS
    inner: ClassVar[tuple[str, ...]] = CLOSINGS
    silent: ClassVar[tuple[str, ...]] = ("[END FINAL RESPONSE]",)
    own_thinks: ClassVar[tuple[tuple[str, str], ...]] = (("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),)

    def body(self, tools: Tools, opening: str) -> Body:
        return JsonBody(STYLE, tools)
