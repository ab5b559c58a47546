"""GigaChat 3: <|function_call|>{"name": ..., "arguments": {...}}, or a message of the role "function call".

moesaic serve DIR --parser gigachat
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from moesaic.serve.parsers import Body, Parser, Tools
from moesaic.serve.parsers._json_calls import JsonBody, JsonStyle

OPENINGS = ("<|message_sep|>", "function call", "<|role_sep|>", "<|function_call|>")
CLOSINGS = ("<|message_sep|>",)
STYLE = JsonStyle(OPENINGS, CLOSINGS)


@dataclass(frozen=True)
class GigaChat(Parser):
    openings: ClassVar[tuple[str, ...]] = ("<|message_sep|>", "function call<|role_sep|>", "<|function_call|>")
    inner: ClassVar[tuple[str, ...]] = ("<|role_sep|>",)

    def body(self, tools: Tools, opening: str) -> Body:
        return JsonBody(STYLE, tools)
