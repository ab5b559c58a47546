"""Reads one completion: where the reasoning ends, where a call starts, and what may be shown already, which is the same
for all styles whose calls stand between content."""

from __future__ import annotations

from typing import ClassVar, Protocol

from moesaic.serve.core.text import overlap
from moesaic.serve.parsers._events import (
    Body,
    CallArguments,
    CallBroken,
    CallEnded,
    CallStarted,
    Content,
    Event,
    Reasoning,
    Tools,
)


class Style(Protocol):
    """What the reader needs to know of a parser."""

    openings: ClassVar[tuple[str, ...]]
    leading: ClassVar[tuple[str, ...]]
    silent: ClassVar[tuple[str, ...]]
    own_thinks: ClassVar[tuple[tuple[str, str], ...]]
    anywhere: ClassVar[bool]

    @property
    def reasoning(self) -> bool: ...

    @property
    def thinks(self) -> tuple[tuple[str, str], ...]: ...

    def body(self, tools: Tools, opening: str) -> Body: ...


class Reader:
    """`pending` is text whose meaning is not certain yet."""

    def __init__(self, style: Style, tools: Tools, prompt: str, prefill: str = "") -> None:
        self.style = style
        self.tools = tools
        self.openings = style.openings if tools else ()
        self.leading = style.leading if tools else ()
        self.thinks = style.thinks if style.reasoning else ()
        self.end_think = next((pair[1] for pair in self.thinks if opens_section(prompt, prefill, *pair)), "")
        begins = "start" if self.thinks and not prefill else "content"
        self.state = "reasoning" if self.end_think else begins
        self.bare = bool(self.end_think) and not prefill  # at the start of a section, where white space is ignored
        self.first = not prefill  # nothing but reasoning came yet
        self.pending = ""
        self.body: Body | None = None
        self.raw: list[str] = []  # a call's text so far, in case it is none
        self.reported = False
        self.calls = 0
        self.called = False  # a call came last: white space after it is ignored
        self.events: list[Event] = []

    def push(self, text: str) -> list[Event]:
        self.pending += text
        while self.pending and self._advance():
            pass
        return self._take()

    def finish(self) -> list[Event]:
        """The completion has ended: whatever was held back is what it looks like."""
        while self.body is not None:
            self.body.finish()
            if self.body.ended:
                self._end_call()
            else:
                self._break_call()
            while self.pending and self._advance():
                pass
        pending, self.pending = self.pending, ""
        if self.state == "reasoning":
            self._emit(Reasoning, pending.rstrip())
        elif pending.strip() or not self.called:
            self._emit(Content, pending)
        return self._take()

    def _advance(self) -> bool:
        """Deal with some of the pending text; False if more is needed."""
        match self.state:
            case "start":
                return self._start()
            case "reasoning":
                return self._reason()
            case "call":
                return self._call()
        return self._content()

    def _start(self) -> bool:
        found = self.pending.lstrip()
        for mark, close in self.thinks:
            if found.startswith(mark):
                self._think(found[len(mark) :], close)
                return True
        if any(mark.startswith(found) for mark, _ in self.thinks):
            return False
        self.state = "content"
        return True

    def _think(self, rest: str, close: str) -> None:
        self.state, self.bare, self.pending, self.end_think = "reasoning", True, rest, close

    def _reason(self) -> bool:
        # Where tags are tokens of their own, a call may break into a section that was not closed.
        ends = (self.end_think, *(self.openings if self.style.anywhere else ()))
        place, tag = _first(self.pending, ends)
        if tag:
            self._emit(Reasoning, self.pending[:place].rstrip())
            skip = len(tag) if tag == self.end_think else 0
            self.state, self.bare, self.pending = "content", True, self.pending[place + skip :]
            return True
        self._emit_certain(Reasoning, ends)
        return False

    def _content(self) -> bool:
        if self.first and self.leading:
            found = self.pending.lstrip()
            tag = next((tag for tag in self.leading if found.startswith(tag)), None)
            if tag is not None:
                self._open(len(self.pending) - len(found), tag)
                return True
            if any(tag.startswith(found) for tag in self.leading):
                return False
        again = tuple(mark for mark, _ in self.style.own_thinks) if self.thinks and self.style.anywhere else ()
        tags = (*self.openings, *self.style.silent, *again)
        place, tag = _first(self.pending, tags)
        if not tag:
            self._emit_certain(Content, tags)
        elif tag in self.openings:
            self._open(place, tag)
        else:
            before, after = self.pending[:place], self.pending[place + len(tag) :]
            content = before.rstrip()
            self._emit(Content, content)
            if tag in again:
                self._think(after, dict(self.thinks)[tag])
            else:
                self.pending = before[len(content) :] + after
        return bool(tag)

    def _open(self, place: int, tag: str) -> None:
        before = self.pending[:place]
        content = before.rstrip()
        self._emit(Content, content)
        self.first = False
        self.raw = [before[len(content) :]]  # white space before a call is ignored, unless there is no call
        self.state, self.pending = "call", self.pending[place:]
        self.body, self.reported = self.style.body(self.tools, tag), False

    def _call(self) -> bool:
        assert self.body is not None
        text, self.pending = self.pending, ""
        self.raw.append(text)
        self.body.push(text)
        if self.body.broken:
            self._break_call()
        elif self.body.ended:
            self._end_call()
        else:
            self._report_call()
        return True

    def _report_call(self) -> None:
        body = self.body
        if body is None or body.name is None:
            return
        if not self.reported:
            self.reported = True
            self.events.append(CallStarted(self.calls, body.name, body.id))
        if body.arguments:
            self.events.append(CallArguments(self.calls, body.arguments))
            body.arguments = ""

    def _end_call(self) -> None:
        assert self.body is not None
        if self.body.name is not None:
            self._report_call()
            self.events.append(CallEnded(self.calls))
            self.calls += 1
            self.called = True
        self.bare, self.pending, self.body = False, self.body.rest, self.body.following
        self.raw, self.reported = [], False
        self.state = "content" if self.body is None else "call"

    def _break_call(self) -> None:
        assert self.body is not None
        self._report_call()
        text = "".join(self.raw).removesuffix(self.body.rest)
        if self.reported:
            self.events.append(CallBroken(self.calls))
            self.calls += 1
        self.bare = False
        if text:
            self.events.append(Content(text))
        self.called = False
        self.state, self.pending, self.body = "content", self.body.rest, None

    def _emit_certain(self, kind: type[Content] | type[Reasoning], tags: tuple[str, ...]) -> None:
        """Report the pending text but for an end that could become a tag, and white space that could precede one."""
        text = self.pending
        keep = max((overlap(text, tag) for tag in tags), default=0)
        certain = text[: len(text) - keep]
        if tags:
            certain = certain.rstrip()
        self._emit(kind, certain)
        self.pending = text[len(certain) :]

    def _emit(self, kind: type[Content] | type[Reasoning], text: str) -> None:
        if self.bare:
            text = text.lstrip()
        if text:
            self.bare = self.called = False
            self.first = self.first and kind is Reasoning
            self.events.append(kind(text))

    def _take(self) -> list[Event]:
        """The events so far; neighbours of one kind become one."""
        joined: list[Event] = []
        for event in self.events:
            last = joined[-1] if joined else None
            if isinstance(event, Content) and isinstance(last, Content):
                joined[-1] = Content(last.text + event.text)
            else:
                joined.append(event)
        self.events = []
        return joined


def opens_section(prompt: str, prefill: str, mark: str, close: str) -> bool:
    """Whether a prompt ends in a reasoning section that it opens, before or in the message that is continued."""
    if mark in prefill or close in prefill:
        return prefill.rfind(mark) > prefill.rfind(close)
    before = prompt.removesuffix(prefill)
    place = before.rfind(mark)
    return place >= 0 and place > before.rfind(close) and not before[place + len(mark) :].strip()


def _first(text: str, tags: tuple[str, ...]) -> tuple[int, str]:
    """Which of some tags comes first, and where; no tag: none."""
    return min(((place, tag) for tag in tags if (place := text.find(tag)) >= 0), default=(0, ""))
