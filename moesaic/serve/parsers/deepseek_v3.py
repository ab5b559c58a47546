"""DeepSeek-R1, V3 and V3.1: NAME and arguments between <｜tool▁call▁begin｜> and <｜tool▁call▁end｜>.

moesaic serve DIR --parser deepseek_v3
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

from moesaic.serve.core.grammars.lark import Rules
from moesaic.serve.parsers import Body, Parser, Tools
from moesaic.serve.parsers._grammar import BREAK, each_call
from moesaic.serve.parsers._headed import HeadedBody, HeadedStyle

CALLS, END_CALLS = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEPARATOR, CLOSING = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
# R1 and V3 write the type first, and the arguments in a block of code. V3.1 writes name and arguments only.
NAME = r"[\w.:/@-]{1,256}"
HEAD = re.compile(
    rf"\w{{1,16}}{SEPARATOR}(?P<name>{NAME})\s{{0,8}}```json\s{{0,8}}(?=\{{)|(?P<name_v31>{NAME}){SEPARATOR}\s{{0,8}}(?=\{{)"
)
STYLE = HeadedStyle(CALL, HEAD, (CLOSING,), sections=(CALLS,), ends=(END_CALLS,), tails=("```",))


@dataclass(frozen=True)
class DeepSeekV3(Parser):
    openings: ClassVar[tuple[str, ...]] = (CALLS, CALL)
    inner: ClassVar[tuple[str, ...]] = (END_CALLS, SEPARATOR, CLOSING)
    anywhere: ClassVar[bool] = True

    def body(self, tools: Tools, opening: str) -> Body:
        return HeadedBody(STYLE, tools)

    def call_rules(self, rules: Rules, tools: Tools) -> dict[str, str] | None:
        def write(name: str, schema: str) -> str:
            older = f"{rules.literal(f'function{SEPARATOR}{name}' + chr(10) + '```json' + chr(10))} {schema}"
            newer = f"{rules.literal(f'{name}{SEPARATOR}')} {schema}"
            return f"({older} {rules.literal(chr(10) + '```')} | {newer})"

        call, closing = each_call(rules, tools, write), rules.literal(CLOSING)
        more = f"({rules.rule(BREAK)} {rules.literal(CALL)} {call} {closing})*"
        return {CALLS: f"{rules.literal(CALL)} {call} {closing} {more} {rules.literal(END_CALLS)}"}
