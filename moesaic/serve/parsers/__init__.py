"""What a model says, taken apart as it comes: answer, reasoning and tool calls.

    parser = detect(tokenizer.chat_template)            # or build(Method("hermes"), Parser, "command line")
    reader = parser.reader(tools=tools, prompt=text)    # one for each answer; no tools: no calls are looked for
    for piece in pieces:
        for event in reader.push(piece): ...            # Content, Reasoning, CallBegan, CallArguments, ...
    for event in reader.finish(): ...

However the text is cut into pieces, the events say the same when joined, and no piece of a tag is ever taken for
content. Text that only looks like a call comes out as content, and nothing raises. A call that breaks off after it has
begun is taken back with `CallBroken`, and its text follows as content. `collect`, which joins events to a message,
leaves such calls out. To who streams they are harmless: the last brace of the arguments comes with the call's end, so
that a broken call's arguments are never whole.

A parser is one file: a frozen dataclass that says which tags open a call, and makes a `Body` that reads one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from moesaic.serve.parsers._reader import Reader

Tools = Sequence[Mapping[str, Any]]  # as in the API: {"type": "function", "function": {"name", "parameters", ...}}


@dataclass(frozen=True)
class Content:
    """More of the answer."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """More of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True)
class CallBegan:
    """A tool is called; `call` counts from 0."""

    call: int
    name: str


@dataclass(frozen=True)
class CallArguments:
    """More of a call's arguments; joined, they are one JSON object."""

    call: int
    text: str


@dataclass(frozen=True)
class CallEnded:
    call: int


@dataclass(frozen=True)
class CallBroken:
    """This call was none after all; its text follows as content."""

    call: int


Event = Content | Reasoning | CallBegan | CallArguments | CallEnded | CallBroken


@dataclass
class Call:
    name: str
    arguments: str = ""


@dataclass
class Message:
    """A whole answer."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)


class Body:
    """Reads one call. `push` takes text, the opening tag first; then the fields say how far the call has come.

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


@dataclass(frozen=True)
class Parser:
    """What a style of tool calls is. `reasoning` looks for a section between <think> and </think> first."""

    reasoning: bool = True
    openings: ClassVar[tuple[str, ...]] = ()  # tags that open a call

    def body(self, tools: Tools) -> Body:
        """A reader for one call."""
        raise NotImplementedError

    def reader(self, tools: Tools | None = None, prompt: str = "") -> Reader:
        """For one answer. `prompt` is what the model was given: some templates open the reasoning section there."""
        from moesaic.serve.parsers._reader import Reader

        return Reader(self, tools or (), prompt)

    def parse(self, text: str, tools: Tools | None = None, prompt: str = "") -> Message:
        """A whole answer at once."""
        reader = self.reader(tools, prompt)
        return collect([*reader.push(text), *reader.finish()])


def collect(events: Iterable[Event]) -> Message:
    """All events of an answer, joined to a message."""
    message, calls = Message(), dict[int, Call]()
    for event in events:
        match event:
            case Content(text):
                message.content += text
            case Reasoning(text):
                message.reasoning += text
            case CallBegan(number, name):
                calls[number] = Call(name)
            case CallArguments(number, text):
                calls[number].arguments += text
            case CallBroken(number):
                del calls[number]
    message.calls = list(calls.values())
    return message


def detect(template: str | None) -> Parser:
    """The parser a model needs, by the tags in its chat template."""
    from moesaic.methods import Method, build

    tags = {"<arg_key>": "glm", "<function=": "qwen3_coder", "<tool_call>": "hermes"}
    name = next((name for tag, name in tags.items() if tag in (template or "")), "plain")
    return build(Method(name), Parser, "chat template")
