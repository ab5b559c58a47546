"""Run a program, shut in (`worlds/sandbox.py`), and show what it printed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from moesaic.worlds.sandbox import Limits, run_python
from moesaic.worlds.tools import Tool, one_text


@dataclass(frozen=True)
class Python(Tool):
    description: ClassVar[str] = "Run a Python program and see what it prints."
    parameters: ClassVar[dict[str, Any]] = one_text("code")

    seconds: float = 5.0
    memory_mb: int = 512
    longest: int = 500  # characters that are shown

    def __call__(self, **arguments: Any) -> str:
        code = arguments.get("code")
        if not isinstance(code, str):
            raise ValueError("code must be text")
        result = run_python(code, limits=Limits(seconds=self.seconds, memory_mb=self.memory_mb))
        if result.ok:
            return result.stdout.strip()[: self.longest] or "(nothing was printed)"
        last = result.stderr.strip().splitlines()[-1:] or [result.why]
        return f"{result.stdout.strip()[: self.longest // 2]}\n{last[0]}".strip()[: self.longest]
