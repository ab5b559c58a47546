"""Cohere Command-R7B, Command-A: <|START_ACTION|>[{"tool_name": ..., "parameters": {...}}, ...]<|END_ACTION|>.

moesaic serve DIR --parser cohere
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from moesaic.serve.parsers import Body, Parser, Tools
from moesaic.serve.parsers._json_calls import JsonBody, JsonStyle

OPENINGS = ("<|START_ACTION|>",)
CLOSINGS = ("<|END_ACTION|>",)
STYLE = JsonStyle(OPENINGS, CLOSINGS)


@dataclass(frozen=True)
class Cohere(Parser):
    openings: ClassVar[tuple[str, ...]] = OPENINGS
    inner: ClassVar[tuple[str, ...]] = CLOSINGS
    silent: ClassVar[tuple[str, ...]] = ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>")
    own_thinks: ClassVar[tuple[tuple[str, str], ...]] = (("<|START_THINKING|>", "<|END_THINKING|>"),)
    anywhere: ClassVar[bool] = True

    def body(self, tools: Tools, opening: str) -> Body:
        return JsonBody(STYLE, tools)
