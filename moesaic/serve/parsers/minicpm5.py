"""MiniCPM5: <function name=NAME><param name=KEY>VALUE</param>...</function>, values perhaps in CDATA.

moesaic serve DIR --parser minicpm5
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from moesaic.serve.parsers import Body, Parser, Tools
from moesaic.serve.parsers._invoke import InvokeBody, InvokeStyle

CALL = '<function name="'
STYLE = InvokeStyle(CALL, '<param name="', "</param>", "</function>", cdata=True, known=True)


@dataclass(frozen=True)
class MiniCPM5(Parser):
    openings: ClassVar[tuple[str, ...]] = (CALL,)
    inner: ClassVar[tuple[str, ...]] = ("</function>", "</param>")

    def body(self, tools: Tools, opening: str) -> Body:
        return InvokeBody(STYLE, tools)
