"""Functionary v3.2: messages to recipients, >>>NAME and the arguments on the next line; content is to "all".

moesaic serve DIR --parser functionary_v32
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

from moesaic.serve.parsers import Body, EventReader, Parser, Reader, Tools
from moesaic.serve.parsers._headed import HeadedBody, HeadedStyle

CALL, ALL = ">>>", "all\n"
STYLE = HeadedStyle(CALL, re.compile(r"(?P<name>[\w.:/@-]{1,256})[ \t]{0,8}\n\s{0,8}(?=\{)"))


@dataclass(frozen=True)
class FunctionaryV32(Parser):
    openings: ClassVar[tuple[str, ...]] = (CALL,)
    silent: ClassVar[tuple[str, ...]] = (CALL + ALL,)

    def body(self, tools: Tools, opening: str) -> Body:
        return MessageBody(STYLE, tools)

    def reader(self, tools: Tools | None = None, prompt: str = "", prefill: str = "") -> EventReader:
        reader = Reader(self, tools or (), prompt, prefill)
        if prompt.endswith(CALL):  # and the completion begins with a recipient
            reader.pending = CALL
        return reader


class MessageBody(HeadedBody):
    def _head(self) -> bool:
        if self.pending.startswith(ALL):
            self.ended, self.rest = True, self.pending[len(ALL) :]
            return False
        return super()._head()
