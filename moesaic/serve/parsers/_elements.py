"""Calls written as elements, one for each argument: what the GLM and Qwen3-Coder styles have in common."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from moesaic.serve.parsers import Body, Tools
from moesaic.serve.parsers._values import argument_as_json, is_name, parameters_of, write_json

NAME = re.compile(r"[^<>\n]*")


class ElementBody(Body):
    """Takes the parts of a call from `pending`, one by one: `step` takes one; False: it needs more text."""

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
        if not is_name(self.called):
            self.broken = True
        elif self.name is None:
            self.name, self.schemas = self.called, parameters_of(self.tools, self.called)
            self.arguments += "{"

    def add_key(self, key: str) -> None:
        self.broken = self.broken or key in self.keys
        self.keys.append(key)

    def add_value(self, text: str) -> None:
        key = self.keys[-1]
        value = argument_as_json(text, self.schemas.get(key))
        self.arguments += f"{', ' if len(self.keys) > 1 else ''}{write_json(key)}: {value}"

    def end(self) -> None:
        self.ended = True
        self.arguments += "}"
