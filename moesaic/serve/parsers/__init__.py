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

A parser is one file: a frozen dataclass that names the tags that open a call, and makes a `Body` that reads one. What
several styles share is in files with an underscore: JSON objects (`_json_calls`), JSON behind a name (`_headed`),
elements (`_elements`, `_invoke`), Python calls (`_pythonic`), messages with headers (`_frames`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

from moesaic.methods import Method, build
from moesaic.model.tokenizer import Tokenizer
from moesaic.serve.core.grammars.lark import Rules
from moesaic.serve.parsers._events import (
    Body,
    Call,
    CallArguments,
    CallBroken,
    CallEnded,
    CallStarted,
    Content,
    Event,
    EventReader,
    Message,
    Reasoning,
    Tools,
    collect,
)
from moesaic.serve.parsers._probe import reads_back, written_calls
from moesaic.serve.parsers._reader import Reader, opens_section
from moesaic.serve.parsers._signs import SIGNS, named_by

__all__ = [
    "Body",
    "Call",
    "CallArguments",
    "CallBroken",
    "CallEnded",
    "CallStarted",
    "Content",
    "Event",
    "EventReader",
    "Message",
    "Parser",
    "Reader",
    "Reasoning",
    "Tools",
    "collect",
    "detect",
]

USUAL = ("hermes", "llama3")  # styles that many models have learned from others
THINK, END_THINK = "<think>", "</think>"


@dataclass(frozen=True)
class Parser:
    """What a style of tool calls is. `reasoning` looks for a section between <think> and </think> first, or between the
    style's own tags."""

    reasoning: bool = True
    openings: ClassVar[tuple[str, ...]] = ()  # tags that open a call
    leading: ClassVar[tuple[str, ...]] = ()  # that open one only where no content came before
    silent: ClassVar[tuple[str, ...]] = ()  # tags around content, which are not part of it
    inner: ClassVar[tuple[str, ...]] = ()  # other tags that its calls need
    own_thinks: ClassVar[tuple[tuple[str, str], ...]] = ()  # tags around reasoning, beside the usual ones
    anywhere: ClassVar[bool] = False  # tags are tokens of their own, and mean the same wherever they stand

    @property
    def thinks(self) -> tuple[tuple[str, str], ...]:
        return (*self.own_thinks, (THINK, END_THINK))

    def body(self, tools: Tools, opening: str) -> Body:
        """A reader for one call, or for a section of calls, that this tag opens."""
        raise NotImplementedError

    def call_rules(self, rules: Rules, tools: Tools) -> dict[str, str] | None:
        """What follows each opening tag where one of the tools is called, as expressions of a grammar: for answers that
        are a call or of a form, and for strict calls. None: whatever the model writes."""
        return None

    def before_answer(self, rules: Rules, prompt: str) -> str | None:
        """What stands before an answer or a forced call, as an expression of a grammar, in a style that has more than a
        reasoning section there."""
        return None

    def end_of_reasoning(self, prompt: str, prefill: str = "") -> str | None:
        """The tag that ends the reasoning section that a prompt has opened; None if it has not."""
        thinks = self.thinks if self.reasoning else ()
        return next((close for mark, close in thinks if opens_section(prompt, prefill, mark, close)), None)

    def reader(self, tools: Tools | None = None, prompt: str = "", prefill: str = "") -> EventReader:
        """For one completion. `prompt` is what the model was given: some templates open the reasoning section there. It
        ends with `prefill` where the completion continues a message."""
        return Reader(self, tools or (), prompt, prefill)

    def parse(self, text: str, tools: Tools | None = None, prompt: str = "") -> Message:
        """A complete text at once."""
        reader = self.reader(tools, prompt)
        return collect([*reader.push(text), *reader.finish()])

    def tags(self, *, calls: bool) -> tuple[str, ...]:
        """Those that must be in the text, though some tokenizers list them as special tokens, which are skipped."""
        thinks = tuple(tag for pair in self.thinks for tag in pair) if self.reasoning else ()
        return (*thinks, *self.silent, *((*self.openings, *self.leading, *self.inner) if calls else ()))

    def markers(self, tokenizer: Tokenizer, *, calls: bool) -> tuple[str, ...]:
        """The special tokens of which these tags are made."""
        return _within(tokenizer.special_tokens, self.tags(calls=calls))

    def call_id(self, name: str, number: int) -> str | None:
        """An id for a call where the model wrote none, and its template demands a certain form. `number` counts all
        calls of the conversation. None: any will do."""
        return None

    def with_ids(self, messages: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
        """A conversation whose calls have ids that the template takes, wherever they come from."""
        return messages


@lru_cache(maxsize=64)
def _within(tokens: tuple[str, ...], tags: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(token for token in tokens if any(token in tag for tag in tags))


@lru_cache(maxsize=16)
def detect(template: str | None) -> Parser:
    """The parser a model needs, by the tags in its chat template; if none are known, by what it makes of a call."""
    found = build(Method(named_by(template or "")), Parser, "chat template")
    if template is None or found.openings or found.leading or found.inner:
        return found
    for turn in written_calls(template):
        for name in dict.fromkeys((*USUAL, *(name for name, _ in SIGNS))):
            other = build(Method(name), Parser, "chat template")
            if reads_back(other.parse, turn):
                return other
    return found
