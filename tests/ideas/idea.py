"""What each method is without its idea, and the test that misses it: `tests/mutations.py` removes them in turn.

A line names the method, its idea in words, the text of its source that holds it, what stands there once the idea is
gone, and the test that claims it. The text is in the method's own file unless `file` says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Idea:
    method: str  # kind/name, as in METHODS of tests/matrix.py
    idea: str
    has: str
    without: str
    test: str  # below tests/
    file: str = ""  # below moesaic/
    slow: bool = False  # more than some five seconds: only on demand

    @property
    def path(self) -> str:
        return self.file or f"{self.method}.py"
