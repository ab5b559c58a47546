"""Step-3: <steptml:invoke name=NAME><steptml:parameter name=KEY>VALUE</steptml:parameter>...</steptml:invoke>.

moesaic serve DIR --parser step3
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from moesaic.serve.parsers import Body, Parser, Tools
from moesaic.serve.parsers._invoke import InvokeBody, InvokeStyle

CALLS, END_CALLS = "<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"
CALL, END_CALL = "<｜tool_call_begin｜>", "<｜tool_call_end｜>"
STYLE = InvokeStyle('<steptml:invoke name="', '<steptml:parameter name="', "</steptml:parameter>", "</steptml:invoke>")


@dataclass(frozen=True)
class Step3(Parser):
    openings: ClassVar[tuple[str, ...]] = ('<steptml:invoke name="',)
    inner: ClassVar[tuple[str, ...]] = ()
    silent: ClassVar[tuple[str, ...]] = (CALLS, CALL, "function<｜tool_sep｜>", END_CALL, END_CALLS)
    anywhere: ClassVar[bool] = True

    def body(self, tools: Tools, opening: str) -> Body:
        return InvokeBody(STYLE, tools)
