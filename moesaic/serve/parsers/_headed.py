"""Calls that are a name and its arguments as one JSON object behind it, between tags."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from moesaic.serve.parsers._events import Body, Tools
from moesaic.serve.parsers._json_text import ObjectText
from moesaic.serve.parsers._values import is_name, names_of, read_json


@dataclass(frozen=True)
class HeadedStyle:
    """`sections` may stand before the first call, `ends` behind the last. A call is the tag `call`, a name (and an id)
    that `head` reads, the arguments, and a tag of `close`."""

    call: str
    head: re.Pattern[str]  # behind that tag; its groups: name, and perhaps id. It looks ahead to the brace.
    close: tuple[str, ...] = ()
    sections: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    optional_close: bool = False  # another call, or nothing, may follow without it
    known: bool = False
    tails: tuple[str, ...] = field(default=())  # may stand before the closing tag


LONGEST_HEAD = 1024


class HeadedBody(Body):
    def __init__(self, style: HeadedStyle, tools: Tools, *, first: bool = True) -> None:
        super().__init__()
        self.style, self.tools = style, tools
        self.state = "section" if first else "between"
        self.pending = ""
        self.object = ObjectText()

    def push(self, text: str) -> None:
        self.pending += text
        while not self.ended and not self.broken and self._step():
            pass

    def finish(self) -> None:
        left = self.pending.strip()
        if self.state == "close" and (not left or left in self.style.tails):
            self._end("")
        elif self.state == "between" and not left:
            self.ended = True

    def _step(self) -> bool:
        style = self.style
        match self.state:
            case "section" | "call":
                found = self.pending.lstrip()
                if found.startswith(style.call):
                    self.state, self.pending = "head", found[len(style.call) :]
                    return True
                tags = (style.call, *(style.sections if self.state == "section" else ()))
                section = next((tag for tag in tags[1:] if found.startswith(tag)), None)
                if section is not None:
                    self.state, self.pending = "call", found[len(section) :]
                    return True
                if not any(tag.startswith(found) for tag in tags):
                    self.broken, self.rest = True, found
            case "between":
                return self._between()
            case "head":
                return self._head()
            case "arguments":
                return self._arguments()
            case "close":
                self._close()
        return False

    def _between(self) -> bool:
        style, found = self.style, self.pending.lstrip()
        if found.startswith(style.call):
            self.state, self.pending = "head", found[len(style.call) :]
            return True
        for tag in style.ends:
            if found.startswith(tag):
                self.ended, self.rest = True, found[len(tag) :]
                return False
        if found and not any(tag.startswith(found) for tag in (style.call, *style.ends)):
            self.ended, self.rest = True, self.pending
        return False

    def _head(self) -> bool:
        head = self.style.head.match(self.pending, 0, LONGEST_HEAD)
        if head is None:
            if "{" in self.pending[:LONGEST_HEAD] or len(self.pending) >= LONGEST_HEAD:
                self._break()
            return False
        groups = head.groupdict()
        name = next(value for key, value in groups.items() if value and key.startswith("name")).strip()
        if not self._may_call(name):
            self._break()
            return False
        self.name, self.id = name, groups.get("id")
        self.state, self.pending = "arguments", self.pending[head.end() :]
        return True

    def _may_call(self, name: str) -> bool:
        return is_name(name) and (not self.style.known or name in names_of(self.tools))

    def _break(self) -> None:
        self.broken, self.rest = True, self.pending

    def _arguments(self) -> bool:
        text, self.pending = self.pending, ""
        if not text:
            return False
        self.object.push(text)
        self.arguments += self.object.take()
        if not self.object.ended:
            return False
        self.pending = self.object.rest
        try:
            valid = isinstance(read_json(self.object.text), dict)
        except ValueError:
            valid = False
        if not valid:
            self._break()
            return False
        self.state = "close"
        if not self.style.close:
            self._end(self.pending)
        return True

    def _close(self) -> None:
        style, found = self.style, self.pending.lstrip()
        for tail in style.tails:
            if found.startswith(tail):
                found = found[len(tail) :].lstrip()
            elif tail.startswith(found):
                return
        for tag in style.close:
            if found.startswith(tag):
                self._end(found[len(tag) :])
                return
        if any(tag.startswith(found) for tag in style.close):
            return
        if style.optional_close:
            self._end(self.pending)
        else:
            self.broken, self.rest = True, found

    def _end(self, rest: str) -> None:
        self.ended, self.rest = True, rest
        self.arguments += "}"
        self.following = type(self)(self.style, self.tools, first=False)
