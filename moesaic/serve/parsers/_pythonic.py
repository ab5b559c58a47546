"""Calls written as Python: [NAME(KEY=VALUE, ...), NAME()], in brackets, between tags, or line by line."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moesaic.serve.parsers._events import Body, Tools
from moesaic.serve.parsers._values import (
    argument_as_json,
    is_name,
    names_of,
    parameters_of,
    read_json,
    read_python,
    types_of,
    write_json,
)

HEAD = re.compile(r"([A-Za-z_][\w.:/-]{0,255})\s{0,8}\(")
PART = re.compile(r"[A-Za-z_][\w.:/-]{0,255}\s{0,8}\Z")  # of a head
PRINT = re.compile(r"\Aprint\s{0,8}\(\s*")
KEY = re.compile(r"\s*([A-Za-z_]\w*)\s*=(?!=)")
MARKS = re.compile(r"""["'\\()\[\]{},]""")
BARE = re.compile(r"[^\s\"'()\[\]{}=][^\"'()\[\]{}=]*")
END_OF_LIST = re.compile(r"\A\s*\]")
SEPARATORS = " \t\r\n,;"


@dataclass(frozen=True)
class PythonStyle:
    """`openings` are the tags before it, of which each one that is there is taken, in this order; a bracket may follow.
    `closings` close the section. With `prints`, a call may be what print() shows."""

    openings: tuple[str, ...] = ()
    closings: tuple[str, ...] = ()
    bracket: bool = True  # and must, where no tag shows that calls follow
    prints: bool = False
    known: bool = False  # only the names of tools
    method: str = ""  # may stand behind a name


class PythonBody(Body):
    """An argument is passed on when it is complete: until then its value is Python, not JSON."""

    def __init__(self, style: PythonStyle, tools: Tools, *, first: bool = True) -> None:
        super().__init__()
        self.style, self.tools = style, tools
        self.state = "open" if first else "between"
        self.pending = ""
        self.called = ""
        self.printed = False
        self.schemas: Mapping[str, Any] = {}
        self.keys: list[str] = []
        # While a value is read: how far, and within what.
        self.place = 0
        self.brackets: list[str] = []
        self.quote = ""

    def push(self, text: str) -> None:
        self.pending += text
        while not self.ended and not self.broken and self._step():
            pass
        if self.broken:
            self.rest = self.pending

    def finish(self) -> None:
        if self.state == "between":
            self._leave(END_OF_LIST.sub("", self.pending) if self.pending.strip(SEPARATORS + "[])`") else "")

    def _step(self) -> bool:
        match self.state:
            case "open":
                return self._open()
            case "between":
                return self._between()
            case "name":
                return self._name()
            case "argument":
                return self._argument()
        return False

    def _open(self) -> bool:
        found = self.pending.lstrip()
        for tag in self.style.openings:
            if found.startswith(tag):
                found = found[len(tag) :].lstrip()
            elif tag.startswith(found):
                return False
        if self.style.bracket:
            if not found:
                return False
            if not self.style.openings and not found.startswith("["):
                self.broken = True
                return False
            found = found.removeprefix("[").lstrip()
        if found:
            self.state, self.pending = "name", found
        return bool(found)

    def _between(self) -> bool:
        found = self.pending.lstrip(SEPARATORS + "])")
        inner = PRINT.sub("", found) if self.style.prints else found
        for tag in self.style.closings:
            if found.startswith(tag):
                self._leave(found[len(tag) :])
                return False
            if tag.startswith(found):
                return False
        if not inner or PART.match(inner):
            return False
        if (head := HEAD.match(inner)) and self._may_call(head[1]):
            self.state, self.pending = "name", found
            return True
        self._leave(END_OF_LIST.sub("", self.pending))
        return False

    def _leave(self, rest: str) -> None:
        self.ended, self.rest = True, rest

    def _may_call(self, name: str) -> bool:
        return is_name(name) and (not self.style.known or self._tool(name) in names_of(self.tools))

    def _tool(self, name: str) -> str:
        return name.removesuffix(self.style.method)

    def _name(self) -> bool:
        self.pending = self.pending.lstrip()
        head = HEAD.match(self.pending)
        if head is None:
            self.broken = bool(self.pending) and not PART.match(self.pending)
            return False
        if self.style.prints and head[1] == "print" and not self.printed:
            self.printed, self.pending = True, self.pending[head.end() :]
            return True
        if not self._may_call(head[1]):
            self.broken = True
            return False
        self.name = self._tool(head[1])
        self.schemas = parameters_of(self.tools, self.name)
        self.arguments, self.pending, self.state = "{", self.pending[head.end() :], "argument"
        return True

    def _argument(self) -> bool:
        """Up to the comma behind it, or the bracket that closes the call."""
        while mark := MARKS.search(self.pending, self.place):
            self.place = mark.end()
            if self.quote:
                if mark[0] == "\\":
                    self.place += 1  # whatever comes next
                elif mark[0] == self.quote:
                    self.quote = ""
            elif mark[0] in "\"'":
                self.quote = mark[0]
            elif mark[0] in "([{":
                self.brackets.append(mark[0])
            elif mark[0] in ")]}" and self.brackets:
                self.brackets.pop()
            elif mark[0] in "]}":
                self.broken = True
                return False
            elif mark[0] in ",)" and not self.brackets:
                return self._complete(mark.start(), mark[0] == ")")
        self.place = max(self.place, len(self.pending))
        return False

    def _complete(self, end: int, last: bool) -> bool:
        text = self.pending[:end]
        if text.strip() or not last:
            try:
                key, value = self._pair(text)
            except ValueError:
                self.broken = True
                return False
            self.keys.append(key)
            self.arguments += f"{', ' if len(self.keys) > 1 else ''}{write_json(key)}: {write_json(value)}"
        self.pending, self.place = self.pending[end + 1 :], 0
        if last:
            self.ended, self.rest = True, self.pending
            self.arguments += "}"
            self.following = PythonBody(self.style, self.tools, first=False)
        return True

    def _pair(self, text: str) -> tuple[str, Any]:
        """Name and value of an argument; one without a name has that of the parameter in its place."""
        if key := KEY.match(text):
            name, text = key[1], text[key.end() :]
        else:
            names = list(self.schemas)
            if len(self.keys) >= len(names):
                raise ValueError("an argument without a name")
            name = names[len(self.keys)]
        if name in self.keys:
            raise ValueError("given twice")
        return name, _value(text.strip(), self.schemas.get(name))


def _value(text: str, schema: object) -> Any:
    """A Python literal, or JSON. A string where the schema has none is what it stands for, and the other way round:
    some templates write calls of earlier turns so, and models learn it."""
    string = "string" in types_of(schema)
    for read in (read_python, read_json):
        try:
            value = read(text)
        except ValueError:
            continue
        return value if string or not isinstance(value, str) else read_json(argument_as_json(value, schema))
    if string and BARE.fullmatch(text):
        return text
    raise ValueError("neither Python nor JSON")
