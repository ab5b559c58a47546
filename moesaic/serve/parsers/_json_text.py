"""One JSON object of a text that is still being written: where it ends, and what of it may be passed on."""

from __future__ import annotations

import re

from moesaic.serve.parsers._values import write_json

MARKS = re.compile(r'["\\{}\[\]\x00-\x1f]')


class ObjectText:
    """Follows brackets and strings from an opening brace to the one that closes it, whether or not it is JSON.

    `text` is the object so far as it was written. `certain` is what may be passed on, where line breaks within strings,
    which models write and JSON does not have, are escaped; the last brace is left out.
    """

    def __init__(self) -> None:
        self.text = ""
        self.certain = ""
        self.rest = ""  # behind it
        self.ended = False
        self.depth = 0
        self.quoted = self.escaped = False

    def push(self, text: str) -> None:
        place = 0
        while mark := MARKS.search(text, place):
            if mark.start() > place:
                self._copy(text[place : mark.start()])
            place = mark.end()
            if self._note(mark[0]):
                self.text, self.rest, self.ended = self.text + text[:place], text[place:], True
                return
        if place < len(text):
            self._copy(text[place:])
        self.text += text

    def take(self) -> str:
        certain, self.certain = self.certain, ""
        return certain

    def _copy(self, text: str) -> None:
        """Text without marks. A backslash has lost its force after it."""
        self.certain += text
        self.escaped = False

    def _note(self, mark: str) -> bool:
        """Whether it was the last."""
        if self.quoted:
            self.certain += write_json(mark)[1:-1] if mark < " " else mark
            if self.escaped or mark < " ":
                self.escaped = False
            elif mark == "\\":
                self.escaped = True
            elif mark == '"':
                self.quoted = False
            return False
        if mark == '"':
            self.quoted = True
        elif mark in "{[":
            self.depth += 1
        elif mark in "}]":
            self.depth -= 1
            if self.depth <= 0:
                return True
        self.certain += mark
        return False
