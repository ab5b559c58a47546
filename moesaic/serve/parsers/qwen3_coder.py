"""Qwen3-Coder: <tool_call><function=NAME><parameter=KEY>VALUE</parameter>...</function></tool_call>.

moesaic serve DIR --parser qwen3_coder
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from moesaic.serve.core.grammars.lark import Rules
from moesaic.serve.parsers import Body, Parser, Tools
from moesaic.serve.parsers._elements import ElementBody
from moesaic.serve.parsers._grammar import BREAK, element_call

OPENING, CLOSING = "<tool_call>", "</tool_call>"
FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"


@dataclass(frozen=True)
class Qwen3Coder(Parser):
    openings: ClassVar[tuple[str, ...]] = (OPENING, FUNCTION)  # these models forget the outer tag now and then
    inner: ClassVar[tuple[str, ...]] = (CLOSING, END_FUNCTION, PARAMETER, END_PARAMETER)

    def body(self, tools: Tools, opening: str) -> Body:
        return FunctionBody(tools)

    def call_rules(self, rules: Rules, tools: Tools) -> dict[str, str] | None:
        key, end, closing = f"{PARAMETER}KEY>\n", f"\n{END_PARAMETER}\n", f"{END_FUNCTION}\n{CLOSING}"
        call = element_call(rules, tools, f"{FUNCTION}NAME>\n", key, end, closing)
        bare = element_call(rules, tools, "NAME>\n", key, end, END_FUNCTION)
        return {OPENING: f"{rules.rule(BREAK)} {call}", FUNCTION: bare}


class FunctionBody(ElementBody):
    def __init__(self, tools: Tools, opening: str = OPENING, closing: str = CLOSING) -> None:
        super().__init__(tools)
        self.opening, self.closing = opening, closing
        self.bare = False  # without the outer tag

    def step(self) -> bool:
        match self.state:
            case "open":
                self.bare = self.tag(self.opening, FUNCTION) == FUNCTION
                return self.to("name" if self.bare else "function")
            case "function":
                return self.tag(FUNCTION) is not None and self.to("name")
            case "name":
                name = self.named(">")
                if name is not None:
                    self.called = name
                    return self.to("arguments", skip=1)
            case "arguments":
                found = self.tag(PARAMETER, END_FUNCTION)
                if found == PARAMETER:
                    self.begin()
                    return self.to("key")
                if found == END_FUNCTION:
                    self.begin()
                    return self.to("close")
            case "key":
                key = self.named(">")
                if key is not None:
                    self.add_key(key)
                    return self.to("value", skip=1)
            case "value":
                value = self.until(END_PARAMETER)
                if value is not None:
                    self.add_value(value.removeprefix("\n").removesuffix("\n"))
                    return self.to("arguments")
            case "close":
                after = self.pending
                if self.tag(self.closing) is not None:
                    self.end()
                elif self.bare and self.broken:
                    self.broken, self.pending = False, after
                    self.end()
        return False

    def finish(self) -> None:
        if self.state == "close" and not self.pending.strip():
            self.end()
