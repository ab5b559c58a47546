"""Calls as Gemma writes them: call:NAME{KEY:VALUE,...}, where strings stand between a mark that no text has."""

from __future__ import annotations

import re
from typing import Any

from moesaic.serve.parsers._elements import ElementBody
from moesaic.serve.parsers._events import Tools
from moesaic.serve.parsers._values import argument_as_json, read_json, write_json

HEAD = re.compile(r"\s{0,8}call:([\w.:/@-]{1,256})\{")
PART = re.compile(r"\s{0,8}(?:c|ca|cal|call|call:[\w.:/@-]{0,256})?\Z")
KEY = re.compile(r"\s*([^\s:{}\[\],][^:{}\[\],]*?)\s*:")


class BracedBody(ElementBody):
    """`typed`: between marks is a string, whatever the schema says."""

    def __init__(self, tools: Tools, opening: str, closing: str, mark: str, *, typed: bool) -> None:
        super().__init__(tools)
        self.opening, self.closing, self.mark, self.typed = opening, closing, mark, typed
        self.signs = re.compile(re.escape(mark) + r"|[{}\[\],]")
        self.quoted = False
        self.depth = 0

    def step(self) -> bool:
        match self.state:
            case "open":
                return self.tag(self.opening) is not None and self.to("name")
            case "name":
                if head := HEAD.match(self.pending):
                    self.called = head[1]
                    self.begin()
                    return self.to("argument", head.end())
                self.broken = not PART.match(self.pending)
            case "argument":
                return self._argument()
            case "close":
                if self.tag(self.closing) is not None:
                    self.end()
        return False

    def finish(self) -> None:
        if self.state == "close" and not self.pending.strip():
            self.end()

    def _argument(self) -> bool:
        """Up to the comma behind it, or the brace that closes the call."""
        while sign := self.signs.search(self.pending, self.searched):
            self.searched = sign.end()
            if sign[0] == self.mark:
                self.quoted = not self.quoted
            elif self.quoted:
                continue
            elif sign[0] in "{[":
                self.depth += 1
            elif sign[0] in "}]" and self.depth:
                self.depth -= 1
            elif sign[0] == "]":
                self.broken = True
                return False
            elif not self.depth:
                return self._complete(sign.start(), sign[0] == "}")
        self.searched = max(self.searched, len(self.pending) - len(self.mark) + 1)
        return False

    def _complete(self, end: int, last: bool) -> bool:
        text = self.pending[:end]
        if text.strip() or not last or self.keys:
            key = KEY.match(text)
            if key is None:
                self.broken = True
                return False
            try:
                name = key[1].replace(self.mark, "")
                value = self._value(text[key.end() :].strip(), self.schemas.get(name))
            except (ValueError, RecursionError):
                self.broken = True
                return False
            self.add_key(name)
            if self.broken:
                return False
            self.add_json(write_json(value))
        self.searched = 0
        return self.to("close" if last else "argument", end + 1)

    def _value(self, text: str, schema: Any = None) -> Any:
        if text.startswith(self.mark):
            if not text.endswith(self.mark) or text.count(self.mark) != 2:
                raise ValueError("a string goes on behind its end")
            inner = text[len(self.mark) : -len(self.mark)]
            types = schema.get("type") if isinstance(schema, dict) else None
            return inner if self.typed or types in (None, "string") else read_json(argument_as_json(inner, schema))
        if text[:1] == "{":
            pairs = [self._pair(part) for part in self._parts(text, "}")]
            return dict(pairs)
        if text[:1] == "[":
            return [self._value(part) for part in self._parts(text, "]")]
        if self.mark in text:
            raise ValueError("a string within a word")
        return read_json(argument_as_json(text, None))

    def _pair(self, text: str) -> tuple[str, Any]:
        key = KEY.match(text)
        if key is None:
            raise ValueError("no key")
        return key[1].replace(self.mark, "").strip('"'), self._value(text[key.end() :].strip())

    def _parts(self, text: str, close: str) -> list[str]:
        """What stands between the commas of a list or an object."""
        if text[-1:] != close:
            raise ValueError("not closed")
        inner, parts, start, depth, quoted = text[1:-1], [], 0, 0, False
        for sign in self.signs.finditer(inner):
            if sign[0] == self.mark:
                quoted = not quoted
            elif not quoted:
                depth += (sign[0] in "{[") - (sign[0] in "}]")
                if sign[0] == "," and not depth:
                    parts.append(inner[start : sign.start()])
                    start = sign.end()
        last = inner[start:]
        return [part.strip() for part in ([*parts, last] if parts or last.strip() else [])]
