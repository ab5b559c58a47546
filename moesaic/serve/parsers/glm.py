"""GLM-4.5 and later: <tool_call>NAME <arg_key>KEY</arg_key> <arg_value>VALUE</arg_value> ... </tool_call>.

moesaic serve DIR --parser glm
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from moesaic.serve.core.grammars.lark import Rules
from moesaic.serve.parsers import Body, Parser, Tools
from moesaic.serve.parsers._elements import ElementBody
from moesaic.serve.parsers._grammar import element_call

OPENING, CLOSING = "<tool_call>", "</tool_call>"
KEY, END_KEY = "<arg_key>", "</arg_key>"
VALUE, END_VALUE = "<arg_value>", "</arg_value>"


@dataclass(frozen=True)
class Glm(Parser):
    openings: ClassVar[tuple[str, ...]] = (OPENING,)
    inner: ClassVar[tuple[str, ...]] = (CLOSING, KEY, END_KEY, VALUE, END_VALUE)

    def body(self, tools: Tools, opening: str) -> Body:
        return ArgumentsBody(tools)

    def call_rules(self, rules: Rules, tools: Tools) -> dict[str, str] | None:
        head, key = "NAME\n", f"{KEY}KEY{END_KEY}\n{VALUE}"
        return {OPENING: element_call(rules, tools, head, key, f"{END_VALUE}\n", CLOSING)}


class ArgumentsBody(ElementBody):
    def step(self) -> bool:
        match self.state:
            case "open":
                return self.tag(OPENING) is not None and self.to("name")
            case "name":
                self.pending = self.pending.lstrip()
                name = self.named("<\n")
                if name is not None:
                    self.called = name
                    return self.to("arguments")
            case "arguments":
                found = self.tag(KEY, CLOSING)
                if found == KEY:
                    self.begin()
                    return self.to("key")
                if found == CLOSING:
                    self.begin()
                    self.end()
            case _:
                return self.argument(END_KEY, VALUE, END_VALUE)
        return False
