"""How many of something, as it is said: 1 token, 2 tokens, 1,000 tokens."""

from __future__ import annotations


def plural(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'' if number == 1 else 's'}"
