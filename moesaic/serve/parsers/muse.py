"""Muse: messages to recipients; to=self is reasoning, and to a tool are <atem:invoke name=NAME> elements.

moesaic serve DIR --parser muse
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

from moesaic.serve.parsers import Body, EventReader, Parser, Reader, Tools
from moesaic.serve.parsers._frames import MESSAGE, START, FrameReader, Kind
from moesaic.serve.parsers._invoke import InvokeBody, InvokeStyle

CALLS, END_CALLS = "<atem:function_calls>", "</atem:function_calls>"
STYLE = InvokeStyle(
    '<atem:invoke name="',
    '<atem:parameter name="',
    "</atem:parameter>",
    "</atem:invoke>",
    section=CALLS,
    end_section=END_CALLS,
)
ENDS = ("<|eom|>", "<|eot|>")
SELF = re.compile(r"\bto=self\b")


@dataclass(frozen=True)
class Muse(Parser):
    openings: ClassVar[tuple[str, ...]] = (CALLS,)
    inner: ClassVar[tuple[str, ...]] = (END_CALLS,)

    def body(self, tools: Tools, opening: str) -> Body:
        return InvokeBody(STYLE, tools)

    def reader(self, tools: Tools | None = None, prompt: str = "", prefill: str = "") -> EventReader:
        return MuseReader(Reader(Muse(reasoning=False), tools or (), ""), self.reasoning)

    def tags(self, *, calls: bool) -> tuple[str, ...]:
        return (START, MESSAGE, *ENDS, *super().tags(calls=calls))


class MuseReader(FrameReader):
    ends = ENDS
    beginnings = (MESSAGE, START, "to=")

    def __init__(self, calls: Reader, reasoning: bool) -> None:
        super().__init__()
        self.calls, self.reasoning = calls, reasoning

    def kind(self, header: str) -> Kind:
        return "reasoning" if self.reasoning and SELF.search(header) else "call"

    def caller(self, header: str) -> EventReader:
        return self.calls  # one for all messages, so that it counts their calls
