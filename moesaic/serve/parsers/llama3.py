"""Llama 3.x: {"name": ..., "parameters": {...}}, perhaps behind <|python_tag|>; ; divides several. Behind that tag also
NAME.call(KEY=VALUE, ...), or Python for a tool that runs it.

moesaic serve DIR --parser llama3
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from moesaic.serve.core.grammars.lark import Rules
from moesaic.serve.parsers import Body, Parser, Tools
from moesaic.serve.parsers._either import EitherBody
from moesaic.serve.parsers._grammar import json_call
from moesaic.serve.parsers._json_calls import JsonBody, JsonStyle
from moesaic.serve.parsers._pythonic import HEAD, PART, PythonBody, PythonStyle
from moesaic.serve.parsers._values import names_of, write_json

TAG = "<|python_tag|>"
JSON = JsonStyle((TAG,), known=True)
TAGGED = JsonStyle((TAG,))
PYTHON = PythonStyle(known=True)
METHODS = PythonStyle((TAG,), known=True, method=".call")
INTERPRETERS = ("python", "ipython", "code_interpreter")  # what such a tool is called


@dataclass(frozen=True)
class Llama3(Parser):
    openings: ClassVar[tuple[str, ...]] = (TAG, '{"name"', '{"type"')  # some say a word before
    leading: ClassVar[tuple[str, ...]] = ("{", "[")

    def body(self, tools: Tools, opening: str) -> Body:
        if opening == "[":
            return PythonBody(PYTHON, tools)
        if opening != TAG:
            return JsonBody(JSON, tools)

        def choose(text: str) -> Body | None:
            found = text[len(TAG) :].lstrip()
            if found[:1] in ("{", "["):
                return JsonBody(TAGGED, tools)
            if not found or PART.match(found):
                return None
            head, known = HEAD.match(found), names_of(tools)
            interpreter = next((name for name in INTERPRETERS if name in known), None)
            if interpreter is None or (head and head[1].removesuffix(METHODS.method) in known):
                return PythonBody(METHODS, tools)
            return CodeBody(interpreter)

        return EitherBody(choose)

    def call_rules(self, rules: Rules, tools: Tools) -> dict[str, str] | None:
        tagged = json_call(rules, tools, "parameters")
        return {"{": json_call(rules, tools, "parameters", head=""), TAG: tagged}


class CodeBody(Body):
    """All the text behind the tag is a program."""

    def __init__(self, interpreter: str) -> None:
        super().__init__()
        self.interpreter = interpreter

    def push(self, text: str) -> None:
        if self.name is None:
            self.name, self.arguments, text = self.interpreter, '{"code": "', text[len(TAG) :]
        self.arguments += write_json(text)[1:-1]

    def finish(self) -> None:
        self.ended = True
        self.arguments += '"}'
