"""Calls written as elements with attributes: <invoke name="NAME"><parameter name="KEY">VALUE</parameter>...</invoke>,
in whatever brackets and words a family has for them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from moesaic.serve.parsers._elements import ElementBody
from moesaic.serve.parsers._events import Tools

STRING = re.compile(r'\b(?:string|type)="(\w+)"')
CDATA, END_CDATA = "<![CDATA[", "]]>"


@dataclass(frozen=True)
class InvokeStyle:
    """`section` may stand around calls. `call` and `parameter` are written up to the quote before a name."""

    call: str
    parameter: str
    end_parameter: str
    end_call: str
    section: str = ""
    end_section: str = ""
    end_of_tag: str = ">"
    strings: bool = False  # a parameter's attributes say whether it is one
    cdata: bool = False
    known: bool = False


class InvokeBody(ElementBody):
    def __init__(self, style: InvokeStyle, tools: Tools, *, first: bool = True) -> None:
        super().__init__(tools)
        self.style, self.known = style, style.known
        self.state = "open" if first else "between"
        self.string: bool | None = None

    def step(self) -> bool:
        style = self.style
        match self.state:
            case "open":
                tags = (style.section, style.call) if style.section else (style.call,)
                found = self.tag(*tags)
                return found is not None and self.to("name" if found == style.call else "call")
            case "call":
                return self.tag(style.call) is not None and self.to("name")
            case "between":
                ends = (style.end_section,) if style.end_section else ()
                return self.between(style.call, ends) and self.to("name")
            case "name":
                if (head := self._head()) is not None:
                    self.called = head[0]
                    return self.to("arguments")
            case "arguments":
                found = self.tag(style.parameter, style.end_call)
                if found is not None:
                    self.begin()
                    if found == style.end_call and not self.broken:
                        self.end()
                        self.following = InvokeBody(style, self.tools, first=False)
                    return self.to("key")
            case "key":
                if (head := self._head()) is not None:
                    self.add_key(head[0])
                    said = STRING.search(head[1]) if style.strings else None
                    self.string = said[1] in ("true", "string") if said else None
                    return self.to("value")
            case "value":
                return self._value()
        return False

    def _value(self) -> bool:
        style = self.style
        if style.cdata and CDATA.startswith(self.pending.lstrip()[: len(CDATA)]):
            start = self.pending.lstrip()
            if len(start) < len(CDATA):
                return False
            if (place := self.pending.find(END_CDATA + style.end_parameter)) < 0:
                return False
            value = start[len(CDATA) : place - (len(self.pending) - len(start))]
            self.pending = self.pending[place + len(END_CDATA + style.end_parameter) :]
        elif (found := self.until(style.end_parameter)) is not None:
            value = found.removeprefix("\n").removesuffix("\n")
        else:
            return False
        self.add_value(value, self.string)
        return self.to("arguments")

    def _head(self) -> tuple[str, str] | None:
        """A name in quotes and the attributes behind it, up to the end of the tag."""
        text = self.until(self.style.end_of_tag)
        if text is None:
            return None
        name, quote, attributes = text.partition('"')
        if not quote or not name or not name.isprintable():
            self.broken = True
            self.pending = text + self.style.end_of_tag + self.pending
            return None
        return name, attributes
