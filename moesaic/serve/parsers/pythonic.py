"""ToolACE, Llama 3.2 with Python calls: [NAME(KEY=VALUE, ...), ...] and nothing else.

moesaic serve DIR --parser pythonic
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from moesaic.serve.parsers import Body, Parser, Tools
from moesaic.serve.parsers._pythonic import PythonBody, PythonStyle

STYLE = PythonStyle(known=True)


@dataclass(frozen=True)
class Pythonic(Parser):
    leading: ClassVar[tuple[str, ...]] = ("[",)

    def body(self, tools: Tools, opening: str) -> Body:
        return PythonBody(STYLE, tools)
