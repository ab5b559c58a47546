"""Gemma 3: calls in a block of Python named tool_code, a list of Python calls, or JSON objects, as it was asked for.

moesaic serve DIR --parser gemma
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from moesaic.serve.parsers import Body, Parser, Tools
from moesaic.serve.parsers._json_calls import JsonBody, JsonStyle
from moesaic.serve.parsers._pythonic import PythonBody, PythonStyle

CODE, JSON_BLOCK = "```tool_code", "```json"
PYTHON = PythonStyle(known=True)
IN_CODE = PythonStyle((CODE,), ("```",), prints=True, known=True)
JSON = JsonStyle(known=True)
IN_BLOCK = JsonStyle((JSON_BLOCK,), ("```",), known=True)


@dataclass(frozen=True)
class Gemma(Parser):
    openings: ClassVar[tuple[str, ...]] = (CODE,)
    leading: ClassVar[tuple[str, ...]] = ("[", "{", JSON_BLOCK)

    def body(self, tools: Tools, opening: str) -> Body:
        match opening:
            case "[":
                return PythonBody(PYTHON, tools)
            case "{":
                return JsonBody(JSON, tools)
            case _ if opening == CODE:
                return PythonBody(IN_CODE, tools)
        return JsonBody(IN_BLOCK, tools)
