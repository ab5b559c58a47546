"""Hunyuan 3: GLM's elements, whose tags carry a word of their own (<tool_call:opensource>), in a section for all calls.

moesaic serve DIR --parser hunyuan_v3
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from moesaic.serve.parsers import Body, Parser, Tools
from moesaic.serve.parsers._elements import ElementBody

WORD = ":opensource"
CALLS, END_CALLS = f"<tool_calls{WORD}>", f"</tool_calls{WORD}>"
CALL, SEPARATOR, END_CALL = f"<tool_call{WORD}>", f"<tool_sep{WORD}>", f"</tool_call{WORD}>"
KEY, END_KEY = f"<arg_key{WORD}>", f"</arg_key{WORD}>"
VALUE, END_VALUE = f"<arg_value{WORD}>", f"</arg_value{WORD}>"


@dataclass(frozen=True)
class HunyuanV3(Parser):
    openings: ClassVar[tuple[str, ...]] = (CALLS, CALL)
    inner: ClassVar[tuple[str, ...]] = (END_CALLS, SEPARATOR, END_CALL, KEY, END_KEY, VALUE, END_VALUE)
    own_thinks: ClassVar[tuple[tuple[str, str], ...]] = ((f"<think{WORD}>", f"</think{WORD}>"),)
    anywhere: ClassVar[bool] = True

    def body(self, tools: Tools, opening: str) -> Body:
        return SectionBody(tools)


class SectionBody(ElementBody):
    def __init__(self, tools: Tools, *, first: bool = True) -> None:
        super().__init__(tools)
        self.state = "open" if first else "between"

    def step(self) -> bool:
        match self.state:
            case "open":
                found = self.tag(CALLS, CALL)
                return found is not None and self.to("name" if found == CALL else "call")
            case "call":
                return self.tag(CALL) is not None and self.to("name")
            case "between":
                return self.between(CALL, (END_CALLS,)) and self.to("name")
            case "name":
                self.pending = self.pending.lstrip()
                name = self.named("<\n")
                if name is not None:
                    self.called = name
                    return self.to("separator")
            case "separator":
                return self.tag(SEPARATOR) is not None and self.to("arguments")
            case "arguments":
                found = self.tag(KEY, END_CALL)
                if found is not None:
                    self.begin()
                    if found == END_CALL and not self.broken:
                        self.end()
                        self.following = SectionBody(self.tools, first=False)
                    return self.to("key")
            case _:
                return self.argument(END_KEY, VALUE, END_VALUE)
        return False
