"""Apertus: <|tools_prefix|>[{NAME: {...}}, ...]<|tools_suffix|>.

moesaic serve DIR --parser apertus
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from moesaic.serve.parsers import Body, Parser, Tools
from moesaic.serve.parsers._json_calls import JsonBody, JsonStyle

OPENINGS = ("<|tools_prefix|>",)
CLOSINGS = ("<|tools_suffix|>",)
STYLE = JsonStyle(OPENINGS, CLOSINGS, keyed=True)


@dataclass(frozen=True)
class Apertus(Parser):
    openings: ClassVar[tuple[str, ...]] = OPENINGS
    inner: ClassVar[tuple[str, ...]] = CLOSINGS
    own_thinks: ClassVar[tuple[tuple[str, str], ...]] = (("<|inner_prefix|>", "<|inner_suffix|>"),)
    anywhere: ClassVar[bool] = True

    def body(self, tools: Tools, opening: str) -> Body:
        return JsonBody(STYLE, tools)
