"""Reasoning and tool call parsers: generated text, taken apart as it streams into content, reasoning and tool calls.

    parser = detect(tokenizer.chat_template)            # or build(Method("hermes"), Parser, "command line")
    reader = parser.reader(tools=tools, prompt=text)    # one for each completion; without tools, no calls
    for piece in pieces:
        for event in reader.push(piece): ...            # Content, Reasoning, CallStarted, CallArguments, ...
    for event in reader.finish(): ...

However the text is cut into pieces, the joined events are the same, and no piece of a tag is ever taken for
content. Text that only looks like a call comes out as content, and nothing raises. A call that breaks off after it has
begun is taken back with `CallBroken`, and its text follows as content. `collect`, which joins events to a message,
leaves such calls out. In a stream they are harmless: the last brace of the arguments comes with the call's end, so
that a broken call's arguments are never complete.

A parser is one file: a frozen dataclass that names the tags that open a call, and makes a `Body` that reads one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from moesaic.methods import Method, build
from moesaic.serve.core.text import overlap

THINK, END_THINK = "<think>", "</think>"

Tools = Sequence[Mapping[str, Any]]  # as in the API: {"type": "function", "function": {"name", "parameters", ...}}


@dataclass(frozen=True)
class Shown:
    text: str


class Content(Shown):
    """More of the content."""


class Reasoning(Shown):
    """More of the reasoning, which comes before the content."""


@dataclass(frozen=True)
class OfCall:
    call: int  # counts from 0


@dataclass(frozen=True)
class CallStarted(OfCall):
    """A tool is called."""

    name: str


@dataclass(frozen=True)
class CallArguments(OfCall):
    """More of a call's arguments; joined, they are one JSON object."""

    text: str


class CallEnded(OfCall):
    """Its arguments are complete."""


class CallBroken(OfCall):
    """This call was none after all; its text follows as content."""


Event = Content | Reasoning | CallStarted | CallArguments | CallEnded | CallBroken


@dataclass
class Call:
    name: str
    arguments: str = ""


@dataclass
class Message:
    """A complete message."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)


class Body:
    """Reads one call. `push` takes text, the opening tag first; then the fields show how far the call has come.

    Whether and where a call ends or breaks must depend on the text alone, not on the pieces it came in.
    """

    def __init__(self) -> None:
        self.name: str | None = None  # once known, and arguments may follow
        self.arguments = ""  # those that have become certain since the reader last took them
        self.ended = False
        self.broken = False
        self.rest = ""  # after it has ended or broken: the text that is not part of it

    def push(self, text: str) -> None:
        raise NotImplementedError

    def finish(self) -> None:
        """No more text comes: a call of which only the closing tag is missing may end."""


class EventReader(Protocol):
    """Text in, events out. `state` is the section of the completion that the text is in."""

    state: str

    def push(self, text: str) -> list[Event]: ...

    def finish(self) -> list[Event]: ...


@dataclass(frozen=True)
class Parser:
    """What a style of tool calls is. `reasoning` looks for a section between <think> and </think> first."""

    reasoning: bool = True
    openings: ClassVar[tuple[str, ...]] = ()  # tags that open a call

    def body(self, tools: Tools) -> Body:
        """A reader for one call."""
        raise NotImplementedError

    def reader(self, tools: Tools | None = None, prompt: str = "") -> Reader:
        """For one completion. `prompt` is what the model was given: some templates open the reasoning section there."""
        return Reader(self, tools or (), prompt)

    def parse(self, text: str, tools: Tools | None = None, prompt: str = "") -> Message:
        """A complete text at once."""
        reader = self.reader(tools, prompt)
        return collect([*reader.push(text), *reader.finish()])


def collect(events: Iterable[Event]) -> Message:
    """All events of a completion, joined to a message."""
    message, calls = Message(), dict[int, Call]()
    for event in events:
        match event:
            case Content(text):
                message.content += text
            case Reasoning(text):
                message.reasoning += text
            case CallStarted(number, name):
                calls[number] = Call(name)
            case CallArguments(number, text):
                calls[number].arguments += text
            case CallBroken(number):
                del calls[number]
    message.calls = list(calls.values())
    return message


def detect(template: str | None) -> Parser:
    """The parser a model needs, by the tags in its chat template."""
    tags = {"<arg_key>": "glm", "<function=": "qwen3_coder", "<tool_call>": "hermes"}
    name = next((name for tag, name in tags.items() if tag in (template or "")), "plain")
    return build(Method(name), Parser, "chat template")


class Reader:
    """Reads one completion: where the reasoning ends, where a call starts, and what may be shown already, which is the
    same for all styles. `pending` is text whose meaning is not certain yet."""

    def __init__(self, parser: Parser, tools: Tools, prompt: str) -> None:
        self.parser = parser
        self.tools = tools
        self.openings = parser.openings if tools else ()
        opened = (
            prompt.rfind(THINK) > prompt.rfind(END_THINK) and not prompt[prompt.rfind(THINK) + len(THINK) :].strip()
        )
        self.state = ("reasoning" if opened else "start") if parser.reasoning else "content"
        self.bare = opened  # at the start of a section, where white space is ignored
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
        if self.body is not None:
            self.body.finish()
            if self.body.ended:
                self._end_call()
            else:
                self._break_call()
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
        if len(found) < len(THINK) and THINK.startswith(found):
            return False
        if found.startswith(THINK):
            self.state, self.bare, self.pending = "reasoning", True, found[len(THINK) :]
        else:
            self.state = "content"
        return True

    def _reason(self) -> bool:
        place = self.pending.find(END_THINK)
        if place >= 0:
            self._emit(Reasoning, self.pending[:place].rstrip())
            self.state, self.bare, self.pending = "content", True, self.pending[place + len(END_THINK) :]
            return True
        self._emit_certain(Reasoning, (END_THINK,))
        return False

    def _content(self) -> bool:
        places = [(place, tag) for tag in self.openings if (place := self.pending.find(tag)) >= 0]
        if not places:
            self._emit_certain(Content, self.openings)
            return False
        place, tag = min(places)
        before = self.pending[:place]
        content = before.rstrip()
        self._emit(Content, content)
        self.raw = [before[len(content) :]]  # white space before a call is ignored, unless there is no call
        self.state, self.pending = "call", self.pending[place:]
        self.body, self.reported = self.parser.body(self.tools), False
        return True

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
            self.events.append(CallStarted(self.calls, body.name))
        if body.arguments:
            self.events.append(CallArguments(self.calls, body.arguments))
            body.arguments = ""

    def _end_call(self) -> None:
        assert self.body is not None
        self._report_call()
        self.events.append(CallEnded(self.calls))
        self.calls += 1
        self.state, self.bare, self.pending, self.body = "content", False, self.body.rest, None
        self.called = True

    def _break_call(self) -> None:
        assert self.body is not None
        self._report_call()
        text = "".join(self.raw).removesuffix(self.body.rest)
        if self.reported:
            self.events.append(CallBroken(self.calls))
            self.calls += 1
        self.bare = False
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
