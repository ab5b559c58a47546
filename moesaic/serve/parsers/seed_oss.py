"""Seed-OSS: <seed:tool_call><function=NAME><parameter=KEY>VALUE</parameter>...</function></seed:tool_call>.

moesaic serve DIR --parser seed_oss
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from moesaic.serve.parsers import Body, Parser, Tools
from moesaic.serve.parsers.qwen3_coder import FunctionBody

OPENING, CLOSING = "<seed:tool_call>", "</seed:tool_call>"


@dataclass(frozen=True)
class SeedOss(Parser):
    openings: ClassVar[tuple[str, ...]] = (OPENING,)
    silent: ClassVar[tuple[str, ...]] = ("<seed:cot_budget_reflect>", "</seed:cot_budget_reflect>")
    inner: ClassVar[tuple[str, ...]] = (CLOSING,)
    own_thinks: ClassVar[tuple[tuple[str, str], ...]] = (("<seed:think>", "</seed:think>"),)

    def body(self, tools: Tools, opening: str) -> Body:
        return FunctionBody(tools, OPENING, CLOSING)
