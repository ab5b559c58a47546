"""Reading Python without running it, from any thread.

CPython before 3.11.8 and 3.12.2 counts how deep it is in a tree once for all threads: where two build trees at a time,
one of them ends in a SystemError though its text is right. So only one is built at a time.
"""

from __future__ import annotations

import ast
import threading
from typing import Any

_one_at_a_time = threading.Lock()


def parse_module(source: str, name: str = "<text>") -> ast.Module:
    with _one_at_a_time:
        return ast.parse(source, name)


def parse_literal(text: str) -> Any:
    """The value of a literal; ValueError or SyntaxError where the text is none."""
    with _one_at_a_time:
        return ast.literal_eval(text)
