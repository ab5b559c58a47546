"""Calls that are JSON objects, {"name": ..., "arguments": {...}}, alone or in a list, between tags or without."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moesaic.serve.parsers._events import Body, Tools
from moesaic.serve.parsers._json_text import ObjectText
from moesaic.serve.parsers._values import is_name, names_of, read_json, write_json

STRING = r'"(?:[^"\\]|\\.)*"'
# The usual order of keys, in which arguments can be passed on while they are written.
HEAD = re.compile(
    rf'\{{\s*(?:"(?:id|tool_call_id|type)"\s*:\s*{STRING}\s*,\s*)*"(?:name|tool_name)"\s*:\s*({STRING})\s*,'
    rf'\s*(?:"(?:id|tool_call_id|type)"\s*:\s*{STRING}\s*,\s*)*"(?:arguments|parameters)"\s*:\s*(?=\{{)'
)
KEYED_HEAD = re.compile(rf"\{{\s*({STRING})\s*:\s*(?=\{{)")  # {NAME: {...}}
FIRST_KEY = re.compile(rf"\{{\s*({STRING})")
LONGEST_HEAD = 2048
END_OF_LIST = re.compile(r"^\s*\]")
KEYS = {"id", "tool_call_id", "type", "name", "tool_name", "arguments", "parameters", "function"}


@dataclass(frozen=True)
class JsonStyle:
    """`openings` are the tags before it, of which each one that is there is taken, in this order. `closings` close the
    section. With `one`, a call ends with its closing tag, which may be missing only at the end of the text."""

    openings: tuple[str, ...] = ()
    closings: tuple[str, ...] = ()
    one: bool = False
    keyed: bool = False  # {NAME: {...}}
    known: bool = False  # only the names of tools: nothing else shows that it is a call


class JsonBody(Body):
    """Follows an object to its end; only then is the whole of it checked. `first`: nothing of the section was read."""

    def __init__(self, style: JsonStyle, tools: Tools, *, first: bool = True) -> None:
        super().__init__()
        self.style, self.tools = style, tools
        self.first = first
        self.pending = ""
        self.object: ObjectText | None = None
        self.args: ObjectText | None = None  # the arguments, if they are passed on as they come
        self.fed = 0  # how much of the object's text they have got
        self.searched = 0  # how far the object was searched for where they begin
        self.complete = False

    def push(self, text: str) -> None:
        if self.object is None:
            self.pending += text
            if not self._begin():
                return
            text, self.pending = self.pending, ""
        if self.complete:
            self.pending += text
        else:
            self._follow(text)
        if self.complete and not self.broken:
            self._close()

    def finish(self) -> None:
        if self.complete and not self.pending.strip():
            self._end("")
        elif not self.first and self.object is None:
            self._leave(END_OF_LIST.sub("", self.pending) if self.pending.strip(" \t\r\n,;[]") else "")

    def _begin(self) -> bool:
        """Whether an object begins; the pending text then begins with it."""
        found = self.pending.lstrip() if self.first else self.pending.lstrip(" \t\r\n,;]")
        for tag in self.style.openings if self.first else self.style.closings:
            if found.startswith(tag):
                found = found[len(tag) :].lstrip() if self.first else found[len(tag) :]
                if not self.first:
                    self._leave(found)
                    return False
            elif tag.startswith(found):
                return False
        if self.first and not self.style.one:
            found = found.removeprefix("[").lstrip()
        if found.startswith("{"):
            self.pending, self.object = found, ObjectText()
            return True
        if found and self.first:
            self.broken, self.rest = True, found
        elif found:
            self._leave(END_OF_LIST.sub("", self.pending, count=1))
        return False

    def _leave(self, rest: str) -> None:
        self.ended, self.rest = True, rest

    def _follow(self, text: str) -> None:
        assert self.object is not None
        self.object.push(text)
        if (
            self.style.known
            and (key := FIRST_KEY.match(self.object.text, 0, LONGEST_HEAD))
            and key[1][1:-1] not in KEYS
        ):
            self.broken = True  # content that is JSON need not wait for its end
            self.rest = self.object.text[key.end() :] + self.object.rest
            return
        if self.args is None and self.searched < LONGEST_HEAD:
            self._find_arguments()
        if self.args is not None and not self.args.ended:
            new, self.fed = self.object.text[self.fed :], len(self.object.text)
            self.args.push(new)
            self.arguments += self.args.take()
        if self.object.ended:
            self.complete, self.pending = True, self.object.rest
            self._check()

    def _find_arguments(self) -> None:
        assert self.object is not None
        head = (KEYED_HEAD if self.style.keyed else HEAD).match(self.object.text, 0, LONGEST_HEAD)
        self.searched = len(self.object.text)
        if head is None:
            return
        try:
            name = read_json(head[1])
        except ValueError:
            return
        if self._may_call(name):
            self.name, self.args, self.fed = name, ObjectText(), head.end()

    def _may_call(self, name: object) -> bool:
        return is_name(name) and (not self.style.known or name in names_of(self.tools))

    def _check(self) -> None:
        """The object is complete: is it a call?"""
        assert self.object is not None
        try:
            call = read_json(self.object.text)
        except ValueError:
            call = None
        name, arguments = _parts(call, self.style.keyed)
        if isinstance(arguments, str):  # some write the object's text as a string
            try:
                arguments = read_json(arguments or "{}")
            except ValueError:
                arguments = None
        if not self._may_call(name) or not isinstance(arguments, dict):
            self.broken, self.rest = True, self.pending
        elif self.name is None:
            self.name, self.arguments = name, write_json(arguments)[:-1]

    def _close(self) -> None:
        if not self.style.one:
            self._end(self.pending)
            self.following = type(self)(self.style, self.tools, first=False)
            return
        found = self.pending.lstrip()
        for tag in self.style.closings:
            if found.startswith(tag):
                self._end(found[len(tag) :])
                return
        if not any(tag.startswith(found) for tag in self.style.closings):
            self.broken, self.rest = True, found

    def _end(self, rest: str) -> None:
        self.ended, self.rest = True, rest
        self.arguments += "}"


def _parts(call: Any, keyed: bool) -> tuple[Any, Any]:
    """Name and arguments."""
    if not isinstance(call, dict):
        return None, None
    if keyed:
        return next(iter(call.items())) if len(call) == 1 else (None, None)
    inner = call.get("function")
    if isinstance(inner, Mapping):  # as in the API
        call = dict(inner)
    name = call.get("name", call.get("tool_name", inner if isinstance(inner, str) else None))
    return name, call.get("arguments", call.get("parameters", {}))
