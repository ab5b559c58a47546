"""No tool calls: content, and a reasoning section before it if the model writes one."""

from __future__ import annotations

from dataclasses import dataclass

from moesaic.serve.parsers import Parser


@dataclass(frozen=True)
class Plain(Parser):
    pass
