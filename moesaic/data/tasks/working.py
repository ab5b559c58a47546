"""Answers worked out step by step, where a few lines of code can: something to say before the answer, which then is the
last line. A model that has seen both ways can find out by trying that one of them is right more often."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def chain_sum(metadata: dict[str, Any], answer: str) -> str:
    """9 - 6 + 8: from left to right, a line for each step."""
    first, *rest = metadata["expression"].split()
    lines, total = [], int(first)
    for sign, number in zip(rest[::2], rest[1::2], strict=True):
        before, total = total, total + int(sign + number)
        lines.append(f"{before}{sign}{number}={total}")
    return "\n".join([*lines, answer])


WORKING: dict[str, Callable[[dict[str, Any], str], str]] = {"chain_sum": chain_sum}
