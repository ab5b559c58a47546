"""Kimi K3: <|open|>call tool=NAME<|sep|>, in it <|open|>argument key=KEY type=TYPE<|sep|>VALUE<|close|>argument<|sep|>.

moesaic serve DIR --parser kimi_k3
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from moesaic.serve.parsers import Body, Parser, Tools
from moesaic.serve.parsers._invoke import InvokeBody, InvokeStyle

CALLS, END_CALLS = "<|open|>tools<|sep|>", "<|close|>tools<|sep|>"
STYLE = InvokeStyle(
    '<|open|>call tool="',
    '<|open|>argument key="',
    "<|close|>argument<|sep|>",
    "<|close|>call<|sep|>",
    section=CALLS,
    end_section=END_CALLS,
    end_of_tag="<|sep|>",
    strings=True,
)


@dataclass(frozen=True)
class KimiK3(Parser):
    openings: ClassVar[tuple[str, ...]] = (CALLS,)
    inner: ClassVar[tuple[str, ...]] = (END_CALLS,)
    silent: ClassVar[tuple[str, ...]] = (
        "<|open|>response<|sep|>",
        "<|close|>response<|sep|>",
        "<|close|>message<|sep|>",
    )
    own_thinks: ClassVar[tuple[tuple[str, str], ...]] = (("<|open|>think<|sep|>", "<|close|>think<|sep|>"),)
    anywhere: ClassVar[bool] = True

    def body(self, tools: Tools, opening: str) -> Body:
        return InvokeBody(STYLE, tools)
