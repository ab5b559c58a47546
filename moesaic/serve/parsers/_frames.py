"""Completions that are several messages: <|start|>HEADER<|message|>TEXT<|end|>, whose headers say to whom they are."""

from __future__ import annotations

from typing import Literal

from moesaic.serve.core.text import overlap
from moesaic.serve.parsers._events import Content, Event, EventReader, Reasoning

START, MESSAGE = "<|start|>", "<|message|>"
Kind = Literal["reasoning", "content", "call"]


class FrameReader:
    """A subclass says what a header means, and reads the text of calls. The prompt has written the first header's
    beginning; where a completion does not go on with it, all of it is content."""

    ends: tuple[str, ...]
    beginnings: tuple[str, ...]  # of what may follow in a header
    state: str

    def __init__(self) -> None:
        self.state = "begin"
        self.pending = ""
        self.inner: EventReader | None = None  # of the message that is being read, if it may be a call
        self.events: list[Event] = []

    def kind(self, header: str) -> Kind:
        raise NotImplementedError

    def caller(self, header: str) -> EventReader:
        """Reads the text of a message that may be a call."""
        raise NotImplementedError

    def push(self, text: str) -> list[Event]:
        self.pending += text
        while self.pending and self._advance():
            pass
        return self._take()

    def finish(self) -> list[Event]:
        pending, self.pending = self.pending, ""
        if self.state == "begin":
            self.state = "content"
        if self.state != "header":
            self._show(pending)
        self._end_message()
        return self._take()

    def _advance(self) -> bool:
        match self.state:
            case "begin":
                found = self.pending.lstrip()
                if any(found.startswith(beginning) for beginning in self.beginnings):
                    self.state = "header"
                elif any(beginning.startswith(found) for beginning in self.beginnings):
                    return False
                else:
                    self.state = "content"
                return True
            case "header":
                place = self.pending.find(MESSAGE)
                if place < 0:
                    return False
                header, self.pending = self.pending[:place], self.pending[place + len(MESSAGE) :]
                self.state = self.kind(header)
                self.inner = self.caller(header) if self.state == "call" else None
                return True
        found_ends = [(place, tag) for tag in self.ends if (place := self.pending.find(tag)) >= 0]
        if found_ends:
            place, tag = min(found_ends)
            text, self.pending = self.pending[:place], self.pending[place + len(tag) :]
            self._show(text)
            self._end_message()
            self.state = "header"
            return True
        keep = max(overlap(self.pending, tag) for tag in self.ends)
        text, self.pending = self.pending[: len(self.pending) - keep], self.pending[len(self.pending) - keep :]
        self._show(text)
        return False

    def _show(self, text: str) -> None:
        if not text:
            return
        if self.inner is not None:
            self.events += self.inner.push(text)
        else:
            self.events.append(Reasoning(text) if self.state == "reasoning" else Content(text))

    def _end_message(self) -> None:
        if self.inner is not None:
            self.events += self.inner.finish()
            self.inner = None

    def _take(self) -> list[Event]:
        events, self.events = self.events, []
        return events
