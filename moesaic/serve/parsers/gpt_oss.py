"""gpt-oss, in the harmony format: messages in the channels analysis (reasoning), commentary (calls) and final.

moesaic serve DIR --parser gpt_oss
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

from moesaic.serve.core.grammars.lark import Rules
from moesaic.serve.parsers import (
    CallArguments,
    CallBroken,
    CallEnded,
    CallStarted,
    Content,
    Event,
    EventReader,
    Parser,
    Tools,
)
from moesaic.serve.parsers._frames import MESSAGE, START, FrameReader, Kind
from moesaic.serve.parsers._json_text import ObjectText
from moesaic.serve.parsers._values import is_name, names_of, read_json

CHANNEL, CONSTRAIN = "<|channel|>", "<|constrain|>"
FUNCTIONS = "functions."
ENDS = ("<|end|>", "<|call|>", "<|return|>")
RECIPIENT = re.compile(r"\bto=([^\s<]+)")


@dataclass(frozen=True)
class GptOss(Parser):
    inner: ClassVar[tuple[str, ...]] = ENDS

    def reader(self, tools: Tools | None = None, prompt: str = "", prefill: str = "") -> EventReader:
        return HarmonyReader(tools or (), self.reasoning)

    def before_answer(self, rules: Rules, prompt: str) -> str | None:
        """An answer is in the channel `final`, and the reasoning before it in `analysis`."""
        if not prompt.endswith(f"{START}assistant"):
            return None
        analysis = f"{rules.literal(f'{CHANNEL}analysis{MESSAGE}')} {rules.until('<|end|>')}"
        return f"({analysis} {rules.literal(f'{START}assistant')})? {rules.literal(f'{CHANNEL}final{MESSAGE}')} "

    def tags(self, *, calls: bool) -> tuple[str, ...]:
        return (CHANNEL, CONSTRAIN, START, MESSAGE, *ENDS)


class HarmonyReader(FrameReader):
    ends = ENDS
    beginnings = (CHANNEL, START, "to=")

    def __init__(self, tools: Tools, reasoning: bool) -> None:
        super().__init__()
        self.names, self.reasoning = names_of(tools), reasoning
        self.calls = 0

    def kind(self, header: str) -> Kind:
        recipient = RECIPIENT.search(header)
        if self.names and recipient and (recipient[1].startswith(FUNCTIONS) or recipient[1] in self.names):
            return "call"
        channel = header.rpartition(CHANNEL)[2].strip()
        return "reasoning" if self.reasoning and channel.startswith("analysis") else "content"

    def caller(self, header: str) -> EventReader:
        recipient = RECIPIENT.search(header)
        assert recipient is not None
        self.calls += 1
        return ArgumentsReader(recipient[1].removeprefix(FUNCTIONS), self.calls - 1)


class ArgumentsReader:
    """The text of a message to a tool: its arguments."""

    state = "call"

    def __init__(self, name: str, call: int) -> None:
        self.name, self.call = name, call
        self.raw = ""
        self.object = ObjectText()
        self.started = False
        self.broken = not is_name(name)

    def push(self, text: str) -> list[Event]:
        self.raw += text
        if self.broken:
            return [Content(text)]
        if not self.started:
            found = self.raw.lstrip()
            if not found:
                return []
            if found[0] != "{":
                self.broken = True
                return [Content(self.raw)]
            self.started, text = True, found
            return [CallStarted(self.call, self.name), *self._arguments(text)]
        return self._arguments(text)

    def _arguments(self, text: str) -> list[Event]:
        if self.object.ended:
            self.object.rest += text
        else:
            self.object.push(text)
        if self.object.rest.strip():
            self.broken = True
            return [*self._certain(), CallBroken(self.call), Content(self.raw)]
        return self._certain()

    def _certain(self) -> list[Event]:
        certain = self.object.take()
        return [CallArguments(self.call, certain)] if certain else []

    def finish(self) -> list[Event]:
        if self.broken:
            return []
        if not self.started:  # no arguments at all
            return [CallStarted(self.call, self.name), CallArguments(self.call, "{}"), CallEnded(self.call)]
        try:
            valid = self.object.ended and isinstance(read_json(self.object.text), dict)
        except ValueError:
            valid = False
        if not valid:
            return [CallBroken(self.call), Content(self.raw)]
        return [CallArguments(self.call, "}"), CallEnded(self.call)]
