"""Llama 4: [NAME(KEY=VALUE, ...), ...], perhaps between <|python_start|> and <|python_end|>, or JSON as Llama 3 has it.

moesaic serve DIR --parser llama4
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from moesaic.serve.parsers import Body, Parser, Tools
from moesaic.serve.parsers._json_calls import JsonBody, JsonStyle
from moesaic.serve.parsers._pythonic import PythonBody, PythonStyle

STYLE = PythonStyle(known=True)
TAGGED = PythonStyle(("<|python_start|>",), ("<|python_end|>",), known=True)
JSON = JsonStyle(known=True)


@dataclass(frozen=True)
class Llama4(Parser):
    openings: ClassVar[tuple[str, ...]] = ("<|python_start|>", '{"name"')
    leading: ClassVar[tuple[str, ...]] = ("[", "{")
    inner: ClassVar[tuple[str, ...]] = ("<|python_end|>",)

    def body(self, tools: Tools, opening: str) -> Body:
        if opening.startswith("{"):
            return JsonBody(JSON, tools)
        return PythonBody(STYLE if opening == "[" else TAGGED, tools)
