"""InternLM2: <|action_start|><|plugin|>{"name": ..., "parameters": {...}}<|action_end|>.

moesaic serve DIR --parser internlm2
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from moesaic.serve.parsers import Body, Parser, Tools
from moesaic.serve.parsers._json_calls import JsonBody, JsonStyle

OPENINGS = ("<|action_start|>", "<|plugin|>")
CLOSINGS = ("<|action_end|>",)
STYLE = JsonStyle(OPENINGS, CLOSINGS)


@dataclass(frozen=True)
class InternLM2(Parser):
    openings: ClassVar[tuple[str, ...]] = OPENINGS[:1]
    inner: ClassVar[tuple[str, ...]] = (*OPENINGS[1:], *CLOSINGS)
    anywhere: ClassVar[bool] = True

    def body(self, tools: Tools, opening: str) -> Body:
        return JsonBody(STYLE, tools)
