"""xLAM: [{"name": ..., "arguments": {...}}, ...] and nothing else, or in a block of code.

moesaic serve DIR --parser xlam
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from moesaic.serve.parsers import Body, Parser, Tools
from moesaic.serve.parsers._json_calls import JsonBody, JsonStyle

STYLE = JsonStyle(known=True)
BLOCK = JsonStyle(("```json", "```"), ("```",), known=True)
TAGGED = JsonStyle(("[TOOL_CALLS]", "<tool_call>"), ("</tool_call>",))


@dataclass(frozen=True)
class XLam(Parser):
    openings: ClassVar[tuple[str, ...]] = ("[TOOL_CALLS]", "<tool_call>", "```json")
    leading: ClassVar[tuple[str, ...]] = ("[", "{", "```")

    def body(self, tools: Tools, opening: str) -> Body:
        return JsonBody(BLOCK if opening.startswith("```") else STYLE if opening in self.leading else TAGGED, tools)
