"""Gemma 4: <|tool_call>call:NAME{KEY:VALUE,...}<tool_call|>, with <|"|> around strings; reasoning in its own channel.

moesaic serve DIR --parser gemma4
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from moesaic.serve.parsers import Body, Parser, Tools
from moesaic.serve.parsers._braced import BracedBody

OPENING, CLOSING, MARK = "<|tool_call>", "<tool_call|>", '<|"|>'


@dataclass(frozen=True)
class Gemma4(Parser):
    openings: ClassVar[tuple[str, ...]] = (OPENING,)
    silent: ClassVar[tuple[str, ...]] = ("<|tool_response>",)
    inner: ClassVar[tuple[str, ...]] = (CLOSING, MARK)
    own_thinks: ClassVar[tuple[tuple[str, str], ...]] = (("<|channel>thought", "<channel|>"),)
    anywhere: ClassVar[bool] = True

    def body(self, tools: Tools, opening: str) -> Body:
        return BracedBody(tools, OPENING, CLOSING, MARK, typed=True)
