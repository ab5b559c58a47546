"""DeepSeek-V3.2 and V4: <｜DSML｜invoke name=NAME>, and in it <｜DSML｜parameter name=KEY string=true|false>.

moesaic serve DIR --parser deepseek_v32
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from moesaic.serve.parsers import Body, Parser, Tools
from moesaic.serve.parsers._invoke import InvokeBody, InvokeStyle

MARK = "｜DSML｜"
CALLS, V4_CALLS = f"<{MARK}function_calls>", f"<{MARK}tool_calls>"


def style(calls: str) -> InvokeStyle:
    return InvokeStyle(
        f'<{MARK}invoke name="',
        f'<{MARK}parameter name="',
        f"</{MARK}parameter>",
        f"</{MARK}invoke>",
        section=calls,
        end_section=calls.replace("<", "</"),
        strings=True,
    )


@dataclass(frozen=True)
class DeepSeekV32(Parser):
    openings: ClassVar[tuple[str, ...]] = (CALLS, V4_CALLS)
    inner: ClassVar[tuple[str, ...]] = (f"</{MARK}function_calls>", f"</{MARK}tool_calls>")
    anywhere: ClassVar[bool] = True

    def body(self, tools: Tools, opening: str) -> Body:
        return InvokeBody(style(opening), tools)
