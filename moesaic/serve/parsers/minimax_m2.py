"""MiniMax-M2: <minimax:tool_call> with <invoke name=NAME><parameter name=KEY>VALUE</parameter>...</invoke> in it.

moesaic serve DIR --parser minimax_m2
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from moesaic.serve.parsers import Body, Parser, Tools
from moesaic.serve.parsers._invoke import InvokeBody, InvokeStyle

CALLS, END_CALLS = "<minimax:tool_call>", "</minimax:tool_call>"
STYLE = InvokeStyle(
    '<invoke name="', '<parameter name="', "</parameter>", "</invoke>", section=CALLS, end_section=END_CALLS
)


@dataclass(frozen=True)
class MiniMaxM2(Parser):
    openings: ClassVar[tuple[str, ...]] = (CALLS,)
    inner: ClassVar[tuple[str, ...]] = (END_CALLS,)
    anywhere: ClassVar[bool] = True

    def body(self, tools: Tools, opening: str) -> Body:
        return InvokeBody(STYLE, tools)
