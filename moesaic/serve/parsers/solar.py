"""Solar Open: <|tool_call:begin|>ID<|tool_call:name|>NAME<|tool_call:args|>{...}<|tool_call:end|>.

moesaic serve DIR --parser solar
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

from moesaic.serve.parsers import Body, Parser, Tools
from moesaic.serve.parsers._headed import HeadedBody, HeadedStyle

CALLS, CALL, END_CALLS = "<|tool_calls|>", "<|tool_call:begin|>", "<|calls|>"
NAMED, ARGUMENTS, CLOSING = "<|tool_call:name|>", "<|tool_call:args|>", "<|tool_call:end|>"
HEAD = re.compile(
    rf"(?P<id>[\w.:-]{{0,64}}){re.escape(NAMED)}(?P<name>[\w.:/@-]{{1,256}}){re.escape(ARGUMENTS)}\s{{0,8}}(?=\{{)"
)
STYLE = HeadedStyle(CALL, HEAD, (CLOSING,), sections=(CALLS,), ends=(END_CALLS,))


@dataclass(frozen=True)
class Solar(Parser):
    openings: ClassVar[tuple[str, ...]] = (CALLS, CALL)
    silent: ClassVar[tuple[str, ...]] = ("<|begin|>assistant", "<|content|>", "<|end|>")
    inner: ClassVar[tuple[str, ...]] = (END_CALLS, NAMED, ARGUMENTS, CLOSING)
    own_thinks: ClassVar[tuple[tuple[str, str], ...]] = (("<|think|>", "<|end|>"),)
    anywhere: ClassVar[bool] = True

    def body(self, tools: Tools, opening: str) -> Body:
        return HeadedBody(STYLE, tools)
