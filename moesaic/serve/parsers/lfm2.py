"""LFM2: <|tool_call_start|>[NAME(KEY=VALUE, ...), ...]<|tool_call_end|>.

moesaic serve DIR --parser lfm2
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from moesaic.serve.parsers import Body, Parser, Tools
from moesaic.serve.parsers._pythonic import PythonBody, PythonStyle

OPENING, CLOSING = "<|tool_call_start|>", "<|tool_call_end|>"
STYLE = PythonStyle((OPENING,), (CLOSING,))


@dataclass(frozen=True)
class Lfm2(Parser):
    openings: ClassVar[tuple[str, ...]] = (OPENING,)
    inner: ClassVar[tuple[str, ...]] = (CLOSING,)
    anywhere: ClassVar[bool] = True

    def body(self, tools: Tools, opening: str) -> Body:
        return PythonBody(STYLE, tools)
