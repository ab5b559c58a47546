"""What a completion is taken apart into: events, and the message that they join to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

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
    """A tool is called; by the id that the model gave the call, if it did."""

    name: str
    id: str | None = None


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


class EventReader(Protocol):
    """Text in, events out. `state` is the section of the completion that the text is in."""

    state: str

    def push(self, text: str) -> list[Event]: ...

    def finish(self) -> list[Event]: ...


class Body:
    """Reads one call. `push` takes text, the opening tag first; then the fields show how far the call has come.

    Whether and where a call ends or breaks must depend on the text alone, not on the pieces it came in. A body that
    ends without a name has read what stands between calls, or closes them.
    """

    def __init__(self) -> None:
        self.name: str | None = None  # once known, and arguments may follow
        self.id: str | None = None  # known with the name, if the model writes ids
        self.arguments = ""  # those that have become certain since the reader last took them
        self.ended = False
        self.broken = False
        self.rest = ""  # after it has ended or broken: the text that is not part of it
        self.following: Body | None = None  # reads the rest, where calls stand together in one section

    def push(self, text: str) -> None:
        raise NotImplementedError

    def finish(self) -> None:
        """No more text comes: a call of which only the closing tag is missing may end."""
