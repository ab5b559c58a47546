"""The report of a rank that does not write one: the run's first rank does."""

from __future__ import annotations

from typing import Any


class SilentReport:
    loss: float | None = None
    dropped = 0

    def note(self, *args: Any, **facts: Any) -> None: ...

    def step(self, record: Any) -> None: ...

    def rewind(self, *args: Any) -> None: ...

    def state(self) -> dict[str, Any]:
        return {"tokens": 0}

    def close(self, outcome: str = "finished", plot: bool = True) -> dict[str, Any]:
        return {"outcome": outcome}

    def __exit__(self, *error: Any) -> None: ...
