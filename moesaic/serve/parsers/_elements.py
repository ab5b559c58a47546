"""Calls written as elements, one for each argument: what the GLM and Qwen3-Coder styles have in common."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from moesaic.serve.parsers._events import Body, Tools
from moesaic.serve.parsers._values import argument_as_json, is_name, names_of, parameters_of, write_json

NAME = re.compile(r"[^<>\n]*")


class ElementBody(Body):
    """Takes the parts of a call from `pending`, one by one: `step` takes one; False: it needs more text."""

    known = False  # whether only the names of tools are calls

    def __init__(self, tools: Tools) -> None:
        super().__init__()
        self.tools = tools
        self.state = "open"
        self.pending = ""
        self.searched = 0  # how far into the pending text a closing tag is known not to be
        self.called = ""
        self.schemas: Mapping[str, Any] = {}
        self.keys: list[str] = []

    def step(self) -> bool:
        raise NotImplementedError

    def push(self, text: str) -> None:
        self.pending += text
        while not self.ended and not self.broken and self.step():
            pass
        if self.ended or self.broken:
            self.rest = self.pending

    def tag(self, *tags: str) -> str | None:
        """The tag that comes next, after white space. Anything else breaks the call."""
        found = self.pending.lstrip()
        for tag in tags:
            if found.startswith(tag):
                self.pending = found[len(tag) :]
                return tag
        if not any(tag.startswith(found) for tag in tags):
            self.broken, self.pending = True, found
        return None

    def named(self, ends: str) -> str | None:
        """A name on one line, before one of the characters that end it, which is left."""
        name = NAME.match(self.pending)
        assert name is not None
        if name.end() == len(self.pending):
            return None
        if self.pending[name.end()] not in ends or not name[0].strip().isprintable():
            self.broken = True
            return None
        self.pending = self.pending[name.end() :]
        return name[0].strip()

    def until(self, tag: str) -> str | None:
        """All text before a closing tag, which is taken as well."""
        place = self.pending.find(tag, self.searched)
        if place < 0:
            self.searched = max(0, len(self.pending) - len(tag) + 1)
            return None
        text, self.pending, self.searched = self.pending[:place], self.pending[place + len(tag) :], 0
        return text

    def begin(self) -> None:
        """Once what follows the name shows that it is one."""
        if not is_name(self.called) or (self.known and self.called not in names_of(self.tools)):
            self.broken = True
        elif self.name is None:
            self.name, self.schemas = self.called, parameters_of(self.tools, self.called)
            self.arguments += "{"

    def add_key(self, key: str) -> None:
        self.broken = self.broken or key in self.keys
        self.keys.append(key)

    def add_value(self, text: str, string: bool | None = None) -> None:
        """`string`: whether the call itself says that it is one."""
        self.add_json(argument_as_json(text, self.schemas.get(self.keys[-1]), string))

    def add_json(self, value: str) -> None:
        self.arguments += f"{', ' if len(self.keys) > 1 else ''}{write_json(self.keys[-1])}: {value}"

    def end(self) -> None:
        self.ended = True
        self.arguments += "}"

    def to(self, state: str, skip: int = 0) -> bool:
        """Go on with another part, behind some characters."""
        self.state, self.pending = state, self.pending[skip:]
        return True

    def argument(self, end_key: str, value: str, end_value: str) -> bool:
        """Between the tags of a key and those of its value, where each argument is a pair of elements."""
        match self.state:
            case "key":
                key = self.until(end_key)
                if key is not None:
                    self.broken = not key.strip().isprintable()
                    self.add_key(key.strip())
                    return self.to("value tag")
            case "value tag":
                return self.tag(value) is not None and self.to("value")
            case "value":
                text = self.until(end_value)
                if text is not None:
                    self.add_value(text)
                    return self.to("arguments")
        return False

    def between(self, opening: str, ends: tuple[str, ...]) -> bool:
        """Behind a call of a section: another, the section's end, or neither."""
        before = self.pending
        found = self.tag(opening, *ends)
        if found == opening:
            return True
        if found is not None or self.broken:
            self.broken, self.ended = False, True
            self.pending = self.pending if found is not None else before
        return False
