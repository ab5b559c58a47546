"""Functionary v3.1, Llama 3.1 with tags of its own: <function=NAME>{...}</function>.

moesaic serve DIR --parser functionary_v31
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

from moesaic.serve.parsers import Body, Parser, Tools
from moesaic.serve.parsers._headed import HeadedBody, HeadedStyle

CALL, CLOSING = "<function=", "</function>"
HEAD = re.compile(r"(?P<name>[\w.:/@-]{1,256})\s{0,8}>\s{0,8}(?=\{)")
STYLE = HeadedStyle(CALL, HEAD, (CLOSING,))


@dataclass(frozen=True)
class FunctionaryV31(Parser):
    openings: ClassVar[tuple[str, ...]] = (CALL,)
    inner: ClassVar[tuple[str, ...]] = (CLOSING, "<|python_tag|>")

    def body(self, tools: Tools, opening: str) -> Body:
        return HeadedBody(STYLE, tools)
