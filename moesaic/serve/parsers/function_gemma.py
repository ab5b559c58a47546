"""FunctionGemma: <start_function_call>call:NAME{KEY:VALUE,...}<end_function_call>, with <escape> around strings.

moesaic serve DIR --parser function_gemma
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from moesaic.serve.parsers import Body, Parser, Tools
from moesaic.serve.parsers._braced import BracedBody

OPENING, CLOSING, MARK = "<start_function_call>", "<end_function_call>", "<escape>"


@dataclass(frozen=True)
class FunctionGemma(Parser):
    openings: ClassVar[tuple[str, ...]] = (OPENING,)
    inner: ClassVar[tuple[str, ...]] = (CLOSING, MARK)
    anywhere: ClassVar[bool] = True

    def body(self, tools: Tools, opening: str) -> Body:
        return BracedBody(tools, OPENING, CLOSING, MARK, typed=False)
