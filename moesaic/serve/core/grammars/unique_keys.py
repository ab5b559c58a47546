"""No key twice in one JSON object. A grammar can say that of keys it names, not of keys the model chooses
(`additionalProperties`, a map, any object): here the keys are read as they are written, and a token that would end a
key the object already has is not allowed."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

QUOTE, BACKSLASH = ord('"'), ord("\\")


class QuoteTokens:
    """The tokens of a vocabulary that have a quote, which alone can end a key: by the bytes before it, and those with
    several, which may hold a whole key."""

    def __init__(self, vocabulary: Iterable[bytes]) -> None:
        self.by_head: dict[bytes, list[int]] = defaultdict(list)
        self.several: list[tuple[int, bytes]] = []
        for token, text in enumerate(vocabulary):
            quotes = text.count(b'"')
            if quotes:
                self.by_head[text[: text.index(b'"')]].append(token)
            if quotes > 1:
                self.several.append((token, text))


class KeyReader:
    """Follows JSON byte by byte. Text before or between JSON texts is passed over; where it could be taken for JSON,
    one of the `resets` after it says that it was none."""

    def __init__(self, resets: Sequence[str] = ()) -> None:
        self.resets = [reset.encode() for reset in resets]
        self.recent = b""
        # The keys of each object that is open; None for a list.
        self.open: list[set[str] | None] = []
        self.at_key = False  # the next string is a key
        self.string: bytearray | None = None  # that is being written
        self.is_key = self.escaped = False

    def feed(self, text: bytes) -> None:
        if self.resets:
            self.recent = (self.recent + text)[-64 - len(text) :]
            for reset in self.resets:
                if (place := self.recent.rfind(reset)) >= 0:
                    text = self.recent[place + len(reset) :]
                    self.recent, self.open, self.string, self.at_key = b"", [], None, False
        self._follow(text, [*self.open], keep=True)

    def duplicates(self, tokens: QuoteTokens, allowed: Any) -> list[int]:
        """Those of the allowed tokens that would write some key twice."""
        if not any(self.open):
            return []
        found: list[int] = []
        if self.string is not None and self.is_key and (keys := self.open[-1]):
            written = bytes(self.string)
            for head, several in tokens.by_head.items():
                if _text(written + head) in keys:
                    found += [token for token in several if allowed[token]]
        for token, text in tokens.several:
            if allowed[token] and self._repeats(text):
                found.append(token)
        return found

    def _repeats(self, text: bytes) -> bool:
        before = (self.string and bytearray(self.string), self.is_key, self.escaped, self.at_key)
        open_ = self.open
        try:
            return self._follow(text, [*self.open], keep=False)
        finally:
            self.open = open_
            self.string, self.is_key, self.escaped, self.at_key = before

    def _follow(self, text: bytes, open_: list[set[str] | None], *, keep: bool) -> bool:
        """Whether a key came twice."""
        repeats = False
        for byte in text:
            if self.string is not None:
                if self.escaped or byte not in (QUOTE, BACKSLASH):
                    self.escaped = False
                elif byte == BACKSLASH:
                    self.escaped = True
                else:
                    keys = open_[-1] if open_ else None
                    if self.is_key and keys is not None:
                        key = _text(bytes(self.string))
                        repeats |= key in keys
                        if keep and key is not None:
                            keys.add(key)
                    self.string = None
                    continue
                self.string.append(byte)
            elif byte in b"{[":
                open_.append(set() if byte == ord("{") else None)
                self.at_key = byte == ord("{")
            elif byte in b"}]":
                if open_:
                    open_.pop()
                self.at_key = False
            elif byte == ord(","):
                self.at_key = bool(open_) and open_[-1] is not None
            elif byte == QUOTE and open_:
                self.string, self.is_key, self.escaped = bytearray(), self.at_key, False
                self.at_key = False
        self.open = open_
        return repeats


def _text(written: bytes) -> str | None:
    """What a string in JSON says; None if it is none."""
    try:
        if b"\\" not in written:
            return written.decode()
        return str(json.loads(b'"' + written + b'"', strict=False))
    except ValueError:
        return None
