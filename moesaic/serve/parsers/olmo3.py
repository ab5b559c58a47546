"""Olmo 3: <function_calls>, then NAME(KEY=VALUE, ...) on a line for each, </function_calls>.

moesaic serve DIR --parser olmo3
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from moesaic.serve.parsers import Body, Parser, Tools
from moesaic.serve.parsers._pythonic import PythonBody, PythonStyle

OPENING, CLOSING = "<function_calls>", "</function_calls>"
STYLE = PythonStyle((OPENING,), (CLOSING,))


@dataclass(frozen=True)
class Olmo3(Parser):
    openings: ClassVar[tuple[str, ...]] = (OPENING,)
    inner: ClassVar[tuple[str, ...]] = (CLOSING,)

    def body(self, tools: Tools, opening: str) -> Body:
        return PythonBody(STYLE, tools)
