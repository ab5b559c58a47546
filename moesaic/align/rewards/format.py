"""Right in form: thoughts and answer in their tags, as DeepSeek-R1's format reward asks, or any pattern."""

from __future__ import annotations

import re
from dataclasses import dataclass

from moesaic.align.rewards import Reward
from moesaic.worlds.judges import Answer


@dataclass(frozen=True)
class Format(Reward):
    tags: tuple[str, ...] = ("think", "answer")  # each once, in this order, filled, with nothing but space between
    pattern: str | None = None  # a regular expression for the whole answer instead

    def __post_init__(self) -> None:
        if self.pattern is not None:
            try:
                re.compile(self.pattern)
            except re.error as error:
                raise ValueError(f"not a regular expression: {error}") from error
        elif not self.tags:
            raise ValueError("name at least one tag, or a pattern")

    def __call__(self, answer: Answer) -> float:
        if self.pattern is not None:
            return float(re.fullmatch(self.pattern, answer.text, re.DOTALL) is not None)
        rest = answer.text.strip()
        for tag in self.tags:
            opened, closed = f"<{tag}>", f"</{tag}>"
            if answer.text.count(opened) != 1 or answer.text.count(closed) != 1 or not rest.startswith(opened):
                return 0.0
            inside, _, rest = rest.removeprefix(opened).partition(closed)
            if not inside.strip():
                return 0.0
            rest = rest.lstrip()
        return float(not rest)
