"""Hermes and Qwen2.5: <tool_call>{"name": ..., "arguments": {...}}</tool_call>.

moesaic serve DIR --parser hermes
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

from moesaic.serve.parsers import Body, Parser, Tools
from moesaic.serve.parsers._values import is_name, read_json, write_json

OPENING, CLOSING = "<tool_call>", "</tool_call>"
# The usual order of keys, in which arguments can be passed on while they are written.
HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
MARKS = re.compile(r'["\\{}\[\]\x00-\x1f]')


@dataclass(frozen=True)
class Hermes(Parser):
    openings: ClassVar[tuple[str, ...]] = (OPENING,)

    def body(self, tools: Tools) -> Body:
        return JsonBody()


class JsonBody(Body):
    """Follows brackets and strings to the end of the object; only then is the whole of it checked."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""  # from the opening tag to where the object ends
        self.place = 0  # how far it has been looked at
        self.depth = 0
        self.quoted = self.escaped = False
        self.arguments_at: int | None = None  # where they begin, if they are passed on as they come
        self.arguments_done = False
        self.tail: str | None = None  # after the object

    def push(self, text: str) -> None:
        if self.tail is not None:
            self.tail += text
        else:
            self.text += text
            if len(self.text) <= len(OPENING):
                return
            self.place = max(self.place, len(OPENING))
            self._find_arguments()
            self._follow()
        if self.tail is not None and not self.broken:
            self._close()

    def finish(self) -> None:
        if self.tail is not None and not self.tail.strip():
            self._end("")

    def _find_arguments(self) -> None:
        if self.name is None and (head := HEAD.match(self.text, len(OPENING))):
            try:
                name = read_json(head[1])
            except ValueError:
                return
            if is_name(name):
                self.name, self.arguments_at = name, head.end()

    def _follow(self) -> None:
        if self.depth == 0:
            found = self.text[self.place :].lstrip()
            if not found:
                return
            self.place = len(self.text) - len(found)
            if found[0] != "{":
                self.broken, self.rest = True, found
                return
        while mark := MARKS.search(self.text, self.place):
            self._copy(mark.start())
            self._note(mark[0])
            if self.depth == 0:
                self.text, self.tail = self.text[: self.place], self.text[self.place :]
                self._check()
                return
        self._copy(len(self.text))

    def _copy(self, until: int) -> None:
        """Text without marks: part of the arguments or not. A backslash has lost its force after it."""
        if until > self.place:
            self._pass_on(self.text[self.place : until])
            self.place, self.escaped = until, False

    def _note(self, mark: str) -> None:
        begins, in_string = self.place, self.quoted
        self.place += 1
        if self.quoted:
            if self.escaped or mark < " ":
                self.escaped = False
            elif mark == "\\":
                self.escaped = True
            elif mark == '"':
                self.quoted = False
        elif mark == '"':
            self.quoted = True
        elif mark in "{[":
            self.depth += 1
        elif mark in "}]":
            self.depth -= 1
        if self.depth == 1 and mark in "}]" and not in_string and self.arguments_at is not None:
            self.arguments_done = True  # the last brace comes with the end of the call
        # Models break lines within strings, which JSON does not.
        self._pass_on(write_json(mark)[1:-1] if in_string and mark < " " else mark, begins)

    def _pass_on(self, text: str, begins: int | None = None) -> None:
        begins = self.place if begins is None else begins
        if self.arguments_at is not None and begins >= self.arguments_at and not self.arguments_done:
            self.arguments += text

    def _check(self) -> None:
        """The object is complete: is it a call?"""
        try:
            call = read_json(self.text[len(OPENING) :])
        except ValueError:
            call = None
        name = call.get("name") if isinstance(call, dict) else None
        arguments = call.get("arguments", call.get("parameters", {})) if isinstance(call, dict) else None
        if isinstance(arguments, str):  # some write the object's text as a string
            try:
                arguments = read_json(arguments)
            except ValueError:
                arguments = None
        if not is_name(name) or not isinstance(arguments, dict):
            self.broken, self.rest = True, self.tail or ""
        elif self.name is None:
            self.name, self.arguments = name, write_json(arguments)[:-1]

    def _close(self) -> None:
        assert self.tail is not None
        found = self.tail.lstrip()
        if found.startswith(CLOSING):
            self._end(found[len(CLOSING) :])
        elif not CLOSING.startswith(found):
            self.broken, self.rest = True, found

    def _end(self, rest: str) -> None:
        self.ended, self.rest = True, rest
        self.arguments += "}"
