"""Llama 3.x: {"name": ..., "parameters": {...}} and nothing else, perhaps behind <|python_tag|>; ; divides several.

moesaic serve DIR --parser llama3
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from moesaic.serve.core.grammars.lark import Rules
from moesaic.serve.parsers import Body, Parser, Tools
from moesaic.serve.parsers._grammar import json_call
from moesaic.serve.parsers._json_calls import JsonBody, JsonStyle
from moesaic.serve.parsers._pythonic import PythonBody, PythonStyle

TAG = "<|python_tag|>"
JSON = JsonStyle((TAG,), known=True)
TAGGED = JsonStyle((TAG,))
PYTHON = PythonStyle(known=True)


@dataclass(frozen=True)
class Llama3(Parser):
    openings: ClassVar[tuple[str, ...]] = (TAG,)
    leading: ClassVar[tuple[str, ...]] = ("{", "[")

    def body(self, tools: Tools, opening: str) -> Body:
        if opening == "[":
            return PythonBody(PYTHON, tools)
        return JsonBody(JSON if opening == "{" else TAGGED, tools)

    def call_rules(self, rules: Rules, tools: Tools) -> dict[str, str] | None:
        tagged = json_call(rules, tools, "parameters")
        return {"{": json_call(rules, tools, "parameters", head=""), TAG: tagged}
