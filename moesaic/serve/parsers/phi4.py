"""Phi-4-mini, Firefunction: functools[{"name": ..., "arguments": {...}}, ...]; Phi-4-mini in its own tags too.

moesaic serve DIR --parser phi4
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from moesaic.serve.parsers import Body, Parser, Tools
from moesaic.serve.parsers._json_calls import JsonBody, JsonStyle

OPENINGS = ("functools", "<|tool_call|>")
CLOSINGS = ("<|/tool_call|>",)
STYLE = JsonStyle(OPENINGS, CLOSINGS)
BARE = JsonStyle(known=True)  # as its template writes earlier calls


@dataclass(frozen=True)
class Phi4(Parser):
    openings: ClassVar[tuple[str, ...]] = OPENINGS
    leading: ClassVar[tuple[str, ...]] = ("{",)
    inner: ClassVar[tuple[str, ...]] = CLOSINGS

    def body(self, tools: Tools, opening: str) -> Body:
        return JsonBody(BARE if opening == "{" else STYLE, tools)
